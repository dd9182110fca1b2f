from __future__ import annotations

import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddptrain.errors import RunLocked
from ddptrain.results.ownership import run_lock


def test_a_lock_is_free_until_it_is_taken_and_after_it_is_let_go(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    assert not run_lock.is_held(path)
    descriptor = run_lock.take(path)
    assert run_lock.is_held(path)
    os.close(descriptor)
    assert not run_lock.is_held(path)


def test_a_second_taker_is_told_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "a-run" / "run.lock"
    path.parent.mkdir()
    descriptor = run_lock.take(path)
    with pytest.raises(RunLocked, match=rf"a-run is held by process {os.getpid()} on") as refused:
        run_lock.take(path)
    os.close(descriptor)
    assert refused.value.exit_code == 6


@pytest.mark.parametrize(("content", "words"), [(b"\xff run", "\ufffd run"), (b" \n", "another process")])
def test_a_second_taker_is_refused_whatever_the_lock_file_says(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a-run" / "run.lock"
    path.parent.mkdir()
    descriptor = run_lock.take(path)
    path.write_bytes(content)
    with pytest.raises(RunLocked) as refused:
        run_lock.take(path)
    os.close(descriptor)
    assert str(refused.value) == f"run a-run is held by {words}; wait for it, or choose another --run-id"


def test_a_lock_dies_with_its_process(driver: Callable[[str], subprocess.Popen[str]], tmp_path: Path) -> None:
    process = driver("a-run")
    path = tmp_path / "runs" / "a-run" / "run.lock"
    assert run_lock.is_held(path)
    process.kill()
    process.wait()
    assert not run_lock.is_held(path)


def test_a_driver_outwaits_a_reader_that_is_looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "_PATIENCE_S", 0.0)  # that is for drivers
    path = tmp_path / "run.lock"
    path.touch()
    reader = os.open(path, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)

    def look_away() -> None:
        time.sleep(0.05)
        os.close(reader)

    looking = threading.Thread(target=look_away)
    looking.start()
    os.close(run_lock.take(path))
    looking.join()
