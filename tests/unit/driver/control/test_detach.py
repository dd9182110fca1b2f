"""A detached driver tells that its run has begun, or why not; nobody waits for ever, and nothing is left."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from ddptrain.driver.control import detach
from ddptrain.driver.control.detach import Begun, EndedEarly, start_detached
from ddptrain.errors import ClusterError

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
