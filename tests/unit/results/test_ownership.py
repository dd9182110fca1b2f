"""Which process works on a run: real locks, and the times of real files."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddptrain.errors import RunLocked
from ddptrain.results import ownership
from ddptrain.results.errors import ResultsError
from ddptrain.results.ownership import LockFile
from ddptrain.results.run import Run
from ddptrain.results.run_record import DriverRecord

HERE = DriverRecord.of_this_process()
ANOTHER_HOST = DriverRecord(1, "another-host", "another-boot")


@pytest.fixture
def layout(tmp_path: Path) -> Run:
    (tmp_path / "run").mkdir()
    return Run(tmp_path / "run")


@pytest.fixture
def owner(layout: Run) -> Iterator[LockFile]:
    made = LockFile(layout.lock_file)
    yield made
    made.release()


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_held_lock_means_that_the_driver_is_alive(layout: Run, owner: LockFile) -> None:
    owner.take()
    age(layout.lock_file, 600)
    assert ownership.is_held(layout.lock_file) is True
    assert ownership.is_alive(layout.lock_file, HERE) and ownership.is_alive(layout.lock_file, ANOTHER_HOST)
    with pytest.raises(RunLocked, match=f"run run is held by process {os.getpid()} on {socket.gethostname()}; wait"):
        ownership.LockFile(layout.lock_file).take()
    owner.release()
    owner.release()
    assert ownership.is_held(layout.lock_file) is False
    ownership.LockFile(layout.lock_file).take().release()


def test_free_lock_of_this_host_means_that_it_is_dead_and_of_another_host_its_age_counts(layout: Run) -> None:
    assert not ownership.is_alive(layout.lock_file, HERE) and not ownership.is_alive(layout.lock_file, ANOTHER_HOST)
    ownership.LockFile(layout.lock_file).take().release()
    assert not ownership.is_alive(layout.lock_file, HERE) and ownership.is_alive(layout.lock_file, ANOTHER_HOST)
    age(layout.lock_file, 25)
    assert ownership.is_alive(layout.lock_file, ANOTHER_HOST)
    age(layout.lock_file, 35)
    assert not ownership.is_alive(layout.lock_file, ANOTHER_HOST)
    assert os.listdir(layout.root) == ["run.lock"]


def test_lock_of_a_killed_process_is_free(tmp_path: Path, driver: Callable[[str], subprocess.Popen[str]]) -> None:
    process = driver("a-run")
    lock = tmp_path / "runs/a-run/run.lock"
    assert ownership.is_held(lock)
    process.kill()
    process.wait()
    assert ownership.is_held(lock) is False
    assert ownership.holder(lock) == f"process {process.pid} on {socket.gethostname()}"


def test_readers_do_not_keep_a_driver_out(layout: Run) -> None:
    layout.lock_file.touch()
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            ownership.is_held(layout.lock_file)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(20):
            ownership.LockFile(layout.lock_file).take().release()
    finally:
        over.set()
        for reader in readers:
            reader.join()


def test_lock_file_that_is_replaced_is_lost(layout: Run, owner: LockFile) -> None:
    owner.take()
    owner.assure()
    layout.lock_file.unlink()
    with pytest.raises(RunLocked):
        owner.assure()
    other = ownership.LockFile(layout.lock_file).take()
    with pytest.raises(RunLocked, match=f"taken over by process {os.getpid()} on"):
        owner.assure()
    other.release()


def test_run_that_is_deleted_while_a_driver_waits_for_its_lock_is_refused(layout: Run) -> None:
    held = ownership.LockFile(layout.lock_file).take()

    def delete() -> None:
        time.sleep(0.1)
        layout.lock_file.unlink()
        held.release()

    deleting = threading.Thread(target=delete)
    deleting.start()
    with pytest.raises(RunLocked, match="run run was deleted by another process"):
        ownership.LockFile(layout.lock_file).take()
    deleting.join()


def test_other_users_cannot_hold_the_lock_and_no_link_is_followed(layout: Run, tmp_path: Path) -> None:
    ownership.LockFile(layout.lock_file).take().release()
    assert stat.S_IMODE(layout.lock_file.stat().st_mode) == 0o600
    layout.lock_file.unlink()
    (tmp_path / "precious").write_text("precious\n")
    layout.lock_file.symlink_to(tmp_path / "precious")
    assert ownership.is_held(layout.lock_file) is None
    with pytest.raises(ResultsError):
        ownership.LockFile(layout.lock_file).take()
    assert (tmp_path / "precious").read_text() == "precious\n"
