"""Stopping a sweep from another shell."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from ddptrain.errors import UsageError
from ddptrain.sweep.folder import LOCK, LocalSweeps
from ddptrain.sweep.records import SweepRecord
from ddptrain.sweep.stop import local_target, stop_sweep, sweep_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "runs" / "s"
    found.mkdir(parents=True)
    SweepRecord("s", "stub", "c.yaml", "2026-01-01T00:00:00.000Z", status="preempted", exit_code=75).save(found)
    return found


def test_a_sweep_is_found_by_name_and_path(folder: Path) -> None:
    assert sweep_folder(str(folder.parent), "s") == folder
    assert sweep_folder("elsewhere", str(folder)) == folder
    assert sweep_folder(str(folder.parent), "other") is None


def test_its_driver_gets_the_signal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stop_sweep(local_target(folder), now=False, tell=print)[1] is False
    leave = threading.Event()
    sent: list[tuple[int, int]] = []
    held = threading.Event()

    def driver() -> None:
        with LocalSweeps(folder.parent).resume(folder.name):
            held.set()
            leave.wait(30)

    thread = threading.Thread(target=driver)
    thread.start()
    assert held.wait(30)

    def kill(pid: int, signum: int) -> None:
        sent.append((pid, signum))
        leave.set()

    monkeypatch.setattr(os, "kill", kill)
    record, was_running = stop_sweep(local_target(folder), now=False, tell=print)
    thread.join()
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert (record.status, was_running) == ("preempted", True)


def test_a_driver_elsewhere_is_named(folder: Path) -> None:
    with LocalSweeps(folder.parent).resume(folder.name):
        (folder / LOCK).write_text(f"process 12 on not-{socket.gethostname()}\n")
        with pytest.raises(UsageError, match=f"can only be stopped on not-{socket.gethostname()}"):
            stop_sweep(local_target(folder), now=False, tell=print)


@pytest.mark.parametrize("changed", ["boot", "started", "nothing was written"])
def test_process_of_a_container_with_the_same_name_gets_no_signal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    monkeypatch.setattr(os, "kill", lambda *given: pytest.fail(f"kill{given}"))
    with LocalSweeps(folder.parent).resume(folder.name):
        who, identity = (folder / LOCK).read_text().splitlines()
        data = json.loads(identity)
        if changed == "boot":
            data["host"]["boot"] = data["host"]["machine"] = "another"
        elif changed == "started":
            data["started"] += 1
        (folder / LOCK).write_text(f"{who}\n" if changed.startswith("nothing") else f"{who}\n{json.dumps(data)}\n")
        with pytest.raises(UsageError, match="another machine or container that is also called"):
            stop_sweep(local_target(folder), now=False, tell=print)
