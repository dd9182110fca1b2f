"""A detached driver tells that its run has begun, or why not; nobody waits for ever, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddptrain import ci
from ddptrain.driver.control import detach
from ddptrain.driver.control.detach import Begun, EndedEarly, start_detached
from ddptrain.errors import ClusterError
from ddptrain.results.layout import RunLayout
from tests.unit.notes import noted

_READY = """
import sys
from pathlib import Path
from ddptrain.driver.control.detach import tell_begun
from ddptrain.results.layout import RunLayout
print("before", flush=True)
tell_begun(int(sys.argv[sys.argv.index("--ready-fd") + 1]), RunLayout(Path(sys.argv[-1])), "it failed")
print("after")
print("and an error", file=sys.stderr)
"""


def driver_is(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(detach, "_program", lambda: [sys.executable, "-c", code])


def test_what_a_driver_prints_is_in_the_log_from_its_first_line_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver_is(monkeypatch, _READY)
    log = tmp_path / "driver.log"
    log.write_text("of the time before\n")
    begun = start_detached(["train", str(tmp_path)])
    assert isinstance(begun, Begun)
    assert (begun.run_id, begun.run_dir, begun.log) == (tmp_path.name, str(tmp_path), str(log))
    assert begun.reason == "it failed" and begun.pid != os.getpid()
    os.waitpid(begun.pid, 0)
    first, second, *rest = log.read_text().splitlines()
    assert (first, second, sorted(rest)) == ("of the time before", "before", ["after", "and an error"])


def test_what_a_driver_prints_follows_no_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver_is(monkeypatch, _READY)
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("precious\n")
    (tmp_path / "run" / "driver.log").symlink_to(tmp_path / "precious")
    ended = start_detached(["train", str(tmp_path / "run")])
    assert isinstance(ended, EndedEarly) and ended.exit_code != 0
    assert "driver.log: it is a symbolic link" in ended.output
    assert (tmp_path / "precious").read_text() == "precious\n"


def test_driver_with_nothing_to_do_tells_so_and_leaves_the_log_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver_is(monkeypatch, _READY.replace("tell_begun", "tell_done"))
    (tmp_path / "driver.log").write_text("of the time before\n")
    begun = start_detached(["train", str(tmp_path)])
    assert isinstance(begun, Begun) and begun.done
    assert begun.log_from == len("of the time before\n")
    os.waitpid(begun.pid, 0)
    assert (tmp_path / "driver.log").read_text() == "of the time before\n"


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


# --- the same in this process ---


class Process:
    """A driver that ends only when it is killed, or at once if it is not `stubborn`."""

    def __init__(self, *, stubborn: bool = False, returncode: int | None = None) -> None:
        self.stubborn, self.returncode = stubborn, returncode
        self.calls: list[Any] = []

    def terminate(self) -> None:
        self.calls.append("terminate")

    def kill(self) -> None:
        self.calls.append("kill")

    def wait(self, deadline_s: float | None = None) -> None:
        self.calls.append(("wait", deadline_s))
        if self.stubborn and deadline_s is not None:
            raise subprocess.TimeoutExpired("driver", deadline_s)


@pytest.mark.parametrize(
    ("process", "calls"),
    [
        (Process(), ["terminate", ("wait", 10.0)]),
        (Process(stubborn=True), ["terminate", ("wait", 10.0), "kill", ("wait", None)]),
        (Process(returncode=0), []),
    ],
)
def test_driver_is_killed_ten_seconds_after_sigterm_and_always_waited_for(process: Any, calls: list[Any]) -> None:
    detach._stop_process(process)
    assert process.calls == calls


def test_driver_gets_the_pipe_as_an_option_of_its_command_and_a_session_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: noted(started, (command, options), "p"))
    output: Any = "output"
    process, ready = detach._start(["train", "x.yaml", "-v"], output, 7, {"A": "b"})
    os.close(ready)
    ((command, options),) = started
    (tell,) = options.pop("pass_fds")
    assert command == [sys.executable, "-P", "-m", "ddptrain", "train", "--ready-fd", str(tell), "x.yaml", "-v"]
    assert options == {"stdin": 7, "stdout": output, "stderr": output, "env": {"A": "b"}, "start_new_session": True}
    assert str(process) == "p" and tell != ready
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(tell)  # only the driver has it, so that its end is noticed


@pytest.mark.parametrize("fails", [True, False])
def test_pipe_is_closed_if_the_driver_cannot_be_started(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    pipes: list[int] = []

    def pipe() -> tuple[int, int]:
        pipes.extend(made := real())
        return made

    def start(*_: object, **__: object) -> None:
        if fails:
            raise OSError("no memory")

    real = os.pipe
    monkeypatch.setattr(os, "pipe", pipe)
    monkeypatch.setattr(subprocess, "Popen", start)
    output: Any = "output"
    if fails:
        with pytest.raises(OSError, match="no memory"):
            detach._start(["train"], output, 0, None)
    else:
        detach._start(["train"], output, 0, None)
        os.close(pipes[0])
    for descriptor in pipes:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_detached_driver_writes_nothing_for_a_ci_service_and_has_two_minutes_to_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process()
    given: list[Any] = []

    def start(*arguments: Any, deadline_s: float) -> Any:
        given.extend([*arguments, deadline_s])
        return process, "begun"

    monkeypatch.setattr(detach, "start_ordered", start)
    monkeypatch.setattr(os, "environ", {"A": "b", ci.SWITCH: "on"})
    begun: object = start_detached(["train"])
    assert begun == "begun" and process.returncode == 0
    assert given == [["train"], b"", {"A": "b", ci.SWITCH: "off"}, 120.0]


def test_output_of_a_driver_is_read_as_a_whole_and_its_position_stays(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * 140_000 + b"\xff")
    with (tmp_path / "log").open("rb") as file:
        file.seek(5)
        assert detach._output_of(file.fileno()) == "x" * 140_000 + "\N{REPLACEMENT CHARACTER}"
        assert file.tell() == 5


def test_output_of_this_process_goes_on_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").write_text("earlier\n")
    with (tmp_path / "out").open("w+") as out, (tmp_path / "err").open("w+") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        print("so far", flush=True)
        assert detach._redirect_output(tmp_path / "log") == len("earlier\n")
        print("later", flush=True)
        print("an error", file=err, flush=True)
    assert (tmp_path / "log").read_text() == "earlier\nso far\nlater\nan error\n"


@pytest.mark.parametrize(("log", "log_from"), [(None, 0), ("of before", 9)])
def test_message_of_a_driver_with_nothing_to_do(tmp_path: Path, log: str | None, log_from: int) -> None:
    if log is not None:
        (tmp_path / "driver.log").write_text(log)
    ready, tell = os.pipe()
    detach.tell_done(tell, RunLayout(tmp_path), "it has succeeded")
    line = detach._read_line(ready, 60.0)
    os.close(ready)
    expected = Begun(
        tmp_path.name,
        str(tmp_path),
        os.getpid(),
        socket.gethostname(),
        str(tmp_path / "driver.log"),
        "it has succeeded",
        log_from,
        done=True,
    )
    assert Begun(**json.loads(line)) == expected


def test_waiting_process_that_is_gone_is_no_error(tmp_path: Path) -> None:
    ready, tell = os.pipe()
    os.close(ready)
    detach.tell_done(tell, RunLayout(tmp_path), "")


_READS = """
import os, sys
line = sys.stdin.readline()
os.close(int(sys.argv[3]))
print(repr(line + sys.stdin.read()))
sys.exit(7)
"""


@pytest.mark.parametrize(("request_line", "read"), [(b"a request\n", "'a request\\n'\n"), (b"", "''\n")])
def test_driver_reads_its_request_and_the_end_of_stdin_if_it_does_not_begin(
    monkeypatch: pytest.MonkeyPatch, request_line: bytes, read: str
) -> None:
    driver_is(monkeypatch, _READS)
    process, ended = detach.start_ordered(["train"], request_line, deadline_s=60.0)
    assert ended == EndedEarly(7, read) and process.returncode == 7
    assert (process.stdin is None) == (not request_line)
