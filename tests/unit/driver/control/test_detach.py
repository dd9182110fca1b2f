"""Detached drivers, and the requests that they are given."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddptrain.driver.control import detach
from ddptrain.driver.control.detach import Begun, EndedEarly, LaunchRequest, read_launch_request, start_detached
from ddptrain.errors import ClusterError, UsageError

# --- A detached driver reports that its run has begun, or why not; nobody waits for ever, and nothing is left ---


_READY = """
import sys
from pathlib import Path
from ddptrain.driver.control.detach import ReportBegun
assert "--ready" in sys.argv
print("before")
folder = Path(sys.argv[-1])
where = {"run_id": folder.name, "run_dir": str(folder), "folder": str(folder)}
ReportBegun().on_event({"event": "run_opened", **where, "reason": "it failed", "done": False})
print("after")
print("and an error", file=sys.stderr)
"""


def driver_is(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(detach, "_program", lambda: [sys.executable, "-c", code])


def test_what_a_driver_prints_is_in_its_log_once_the_run_has_begun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver_is(monkeypatch, _READY)
    log = tmp_path / "driver.log"
    log.write_text("of the time before\n")
    begun = start_detached(["train", str(tmp_path)])
    assert isinstance(begun, Begun)
    assert (begun.run_id, begun.run_dir, begun.log) == (tmp_path.name, str(tmp_path), str(log))
    assert (begun.reason, begun.log_from, begun.done) == ("it failed", len("of the time before\n"), False)
    os.waitpid(begun.pid, 0)
    assert sorted(log.read_text().splitlines()) == ["after", "and an error", "of the time before"]
    assert capsys.readouterr().err == "before\n"


def test_what_a_driver_prints_follows_no_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver_is(monkeypatch, _READY)
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("precious\n")
    (tmp_path / "run" / "driver.log").symlink_to(tmp_path / "precious")
    ended = start_detached(["train", str(tmp_path / "run")])
    assert isinstance(ended, EndedEarly) and ended.exit_code != 0
    assert "driver.log: " in ended.output
    assert (tmp_path / "precious").read_text() == "precious\n"


def test_driver_with_nothing_to_do_leaves_the_log_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver_is(monkeypatch, _READY.replace("False", "True"))
    begun = start_detached(["train", str(tmp_path)])
    assert isinstance(begun, Begun) and begun.done
    os.waitpid(begun.pid, 0)
    assert not (tmp_path / "driver.log").exists()


def test_driver_that_ends_early_is_quoted_with_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    driver_is(monkeypatch, "import sys; print('why', file=sys.stderr); sys.exit(6)")
    assert start_detached(["train"]) == EndedEarly(6, "why\n")


def test_driver_that_ends_early_without_an_error_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    driver_is(monkeypatch, "pass")
    assert start_detached(["train"]) == EndedEarly(3, "")


def test_driver_that_never_begins_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    before = psutil.Process().children()
    driver_is(monkeypatch, "import time; time.sleep(600)")
    with pytest.raises(ClusterError, match=r"within 0\.3 s; try it without --detach"):
        start_detached(["train"], deadline_s=0.3)
    assert psutil.Process().children() == before


def test_ctrl_c_before_the_run_has_begun_ends_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = psutil.Process().children()
    driver_is(monkeypatch, f"import time; open({str(tmp_path / 'up')!r}, 'w').close(); time.sleep(600)")

    def press() -> None:
        while not (tmp_path / "up").exists():
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        start_detached(["train"])
    pressing.join()
    assert psutil.Process().children() == before


_READS = """
import os, sys
line = sys.stdin.readline()
devnull = os.open(os.devnull, os.O_WRONLY)
sys.stdout.write(repr(line) + chr(10))
sys.stdout.flush()
os.dup2(devnull, 1), os.dup2(devnull, 2)
sys.exit(7 if sys.stdin.read() == "" else 8)
"""


@pytest.mark.parametrize(("request_line", "read"), [(b"a request\n", "'a request\\n'\n"), (b"", "''\n")])
def test_driver_reads_its_request_and_the_end_of_stdin_if_it_does_not_begin(
    monkeypatch: pytest.MonkeyPatch, request_line: bytes, read: str
) -> None:
    driver_is(monkeypatch, _READS)
    process, ended = detach.start_ordered(["train"], request_line, deadline_s=60.0)
    assert ended == EndedEarly(7, read) and process.returncode == 7


# --- The request of a program to its driver, read from stdin ---


@pytest.fixture
def stdin() -> Iterator[int]:
    """The write end of a pipe that takes the place of descriptor 0."""
    kept = os.dup(0)
    read, write = os.pipe()
    os.dup2(read, 0)
    os.close(read)
    yield write
    os.dup2(kept, 0)
    os.close(kept)
    os.close(write)


def test_request_is_read_as_it_was_sent_and_stdin_stays_open(stdin: int) -> None:
    request = LaunchRequest({"workload": "m:f", "env": {"A": "b"}}, "/folder", ["params.x=1"], together=False)
    os.write(stdin, request.to_line())
    assert read_launch_request() == request


@pytest.mark.parametrize("line", [b"\n", b"{}\n", b"[1]\n", b'{"config": 1, "more": 2}\n'])
def test_anything_else_is_refused(stdin: int, line: bytes) -> None:
    os.write(stdin, line)
    with pytest.raises(UsageError, match=r"--ordered is for ddptrain\.launch"):
        read_launch_request()


def test_run_that_goes_together_with_its_program_is_sent_sigterm_when_that_ends(
    stdin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    sent: list[tuple[int, int]] = []

    def kill(pid: int, signum: int) -> None:
        sent.append((pid, signum))
        ended.set()

    monkeypatch.setattr(os, "kill", kill)
    writer = threading.Thread(target=os.write, args=(stdin, LaunchRequest(None, "/f", [], together=True).to_line()))
    writer.start()
    assert read_launch_request().together
    writer.join()
    (watching,) = [thread for thread in threading.enumerate() if thread.name == "ddptrain-program"]
    assert watching.daemon and sent == []
    os.write(stdin, b"noise")  # does not matter
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stdin)  # closes the only write end of the pipe
    os.close(null)
    watching.join(60)
    assert ended.is_set() and sent == [(os.getpid(), signal.SIGTERM)]
