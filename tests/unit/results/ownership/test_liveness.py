"""Whether the driver of a run is alive: the decision as a table, and the signs as they are on the disk."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddptrain import host_identity
from ddptrain.errors import DdptrainError, RunLocked
from ddptrain.results.layout import RunLayout
from ddptrain.results.ownership import driver_heartbeat, liveness, run_lock
from ddptrain.results.ownership.driver_heartbeat import Heartbeat, HeartbeatState
from ddptrain.results.ownership.liveness import QUIET_AFTER_S, Liveness, Signs, decide
from ddptrain.results.ownership.run_lock import LockState
from ddptrain.results.run_record import DriverRecord

HERE, ELSEWHERE = True, False
LONG = QUIET_AFTER_S + 1
ANOTHER_HOST = DriverRecord(1, "another-host", "another-boot")


@pytest.mark.parametrize(
    ("state", "is_here", "pulse", "quiet_s", "expected"),
    [
        # A lock that is seen to be held settles it, whatever else there is to see.
        (LockState.HELD, HERE, HeartbeatState.NONE, LONG, Liveness.RUNNING),
        (LockState.HELD, HERE, HeartbeatState.SILENT, LONG, Liveness.RUNNING),
        (LockState.HELD, ELSEWHERE, HeartbeatState.SILENT, LONG, Liveness.RUNNING),
        (LockState.HELD, ELSEWHERE, HeartbeatState.NONE, LONG, Liveness.RUNNING),
        # Locks of this host are always seen.
        (LockState.FREE, HERE, HeartbeatState.NONE, 0.0, Liveness.GONE),
        (LockState.FREE, HERE, HeartbeatState.BEATING, 0.0, Liveness.GONE),
        # Elsewhere a free lock may be one that is not shown: the heartbeat decides, however long nothing was logged.
        (LockState.FREE, ELSEWHERE, HeartbeatState.BEATING, LONG, Liveness.RUNNING),
        (LockState.FREE, ELSEWHERE, HeartbeatState.SILENT, 0.0, Liveness.GONE),
        # The lock of another user can't be looked at.
        (LockState.UNKNOWN, HERE, HeartbeatState.BEATING, LONG, Liveness.RUNNING),
        (LockState.UNKNOWN, HERE, HeartbeatState.SILENT, 0.0, Liveness.GONE),
        (LockState.UNKNOWN, ELSEWHERE, HeartbeatState.BEATING, LONG, Liveness.RUNNING),
        # Runs of older versions have no heartbeat: silence proves nothing.
        (LockState.FREE, ELSEWHERE, HeartbeatState.NONE, QUIET_AFTER_S, Liveness.RUNNING),
        (LockState.FREE, ELSEWHERE, HeartbeatState.NONE, LONG, Liveness.UNKNOWN),
        (LockState.UNKNOWN, HERE, HeartbeatState.NONE, LONG, Liveness.UNKNOWN),
    ],
)
def test_who_is_alive(
    state: LockState, is_here: bool, pulse: HeartbeatState, quiet_s: float, expected: Liveness
) -> None:
    assert decide(Signs(state, is_here, pulse, quiet_s)) is expected


@pytest.mark.parametrize(
    ("host", "boot", "expected"),
    [
        ("this-host", "this-boot", True),
        ("a-container", "this-boot", True),
        ("this-host", "another-boot", False),  # a clone, a container of the same name, or before the last boot
        ("this-host", "", True),  # of an older version
        ("another-host", "", False),
        ("", "", True),
    ],
)
def test_a_host_is_known_by_its_boot(host: str, boot: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_identity, "this_host", lambda: host_identity.HostId("this-host", boot="this-boot"))
    assert host_identity.is_this_host(host, boot) is expected


def test_a_boot_has_one_id() -> None:
    record = DriverRecord.of_this_process()
    assert record.boot_id == host_identity.boot_id() != ""
    assert host_identity.is_this_host(record.host, record.boot_id)


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    made = RunLayout(tmp_path / "a-run")
    made.root.mkdir()
    return made


def age(path: Path, by_s: float) -> None:
    then = time.time() - by_s
    os.utime(path, (then, then))


def test_a_lock_that_another_host_holds_is_believed_whatever_the_age_of_the_files(
    driver: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    driver("a-run")
    layout = RunLayout(tmp_path / "runs" / "a-run")
    for path in layout.root.iterdir():
        age(path, 3600)
    assert liveness.look(layout, ANOTHER_HOST) is Liveness.RUNNING


def test_a_heartbeat_decides_where_the_lock_of_another_host_looks_free(layout: RunLayout) -> None:
    layout.run_json.write_text("{}")
    age(layout.run_json, 3600)
    assert liveness.look(layout, ANOTHER_HOST) is Liveness.UNKNOWN
    kept = Heartbeat(layout.heartbeat_file)
    assert liveness.look(layout, ANOTHER_HOST) is Liveness.RUNNING
    assert liveness.look(layout, DriverRecord.of_this_process()) is Liveness.GONE  # nobody holds the lock
    age(layout.heartbeat_file, 3600)
    assert liveness.look(layout, ANOTHER_HOST) is Liveness.GONE
    kept.close()


def test_the_lock_of_our_own_does_not_count(layout: RunLayout) -> None:
    held = run_lock.take(layout.lock_file)
    try:
        assert liveness.look(layout, DriverRecord.of_this_process()) is Liveness.RUNNING
        assert liveness.look(layout, DriverRecord.of_this_process(), is_ours=True) is Liveness.GONE
    finally:
        os.close(held)


def test_a_lock_that_cannot_be_read_is_no_free_one(layout: RunLayout) -> None:
    layout.lock_file.symlink_to(layout.root / "elsewhere")
    assert run_lock.look(layout.lock_file) is LockState.UNKNOWN
    layout.lock_file.unlink()
    os.mkfifo(layout.lock_file)
    assert run_lock.look(layout.lock_file) is LockState.UNKNOWN
    layout.lock_file.unlink()
    assert run_lock.look(layout.lock_file) is LockState.FREE


def test_a_heartbeat_beats_and_goes_with_its_driver(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_heartbeat, "BEAT_EVERY_S", 0.01)
    kept = Heartbeat(layout.heartbeat_file)
    age(layout.heartbeat_file, 3600)
    kept.keep(lambda error: pytest.fail(str(error)))
    deadline = time.monotonic() + 30
    while driver_heartbeat.look(layout.heartbeat_file) is not HeartbeatState.BEATING:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kept.close()
    kept.close()
    assert not layout.heartbeat_file.exists()


def test_a_driver_whose_run_was_taken_over_is_told_once_and_leaves_the_others_heartbeat(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_heartbeat, "BEAT_EVERY_S", 0.01)
    told: list[DdptrainError] = []
    lost = threading.Event()

    def hear(error: DdptrainError) -> None:
        told.append(error)
        lost.set()

    kept = Heartbeat(layout.heartbeat_file)
    kept.keep(hear)
    other = Heartbeat(layout.heartbeat_file)
    assert lost.wait(30)
    kept.close()
    assert [type(error) for error in told] == [RunLocked]
    assert f"a-run has been taken over by process {os.getpid()} on" in str(told[0])
    assert layout.heartbeat_file.exists()
    other.close()


def test_a_beat_creates_a_file_that_is_missing_and_touches_its_own(layout: RunLayout) -> None:
    kept = Heartbeat(layout.heartbeat_file)
    text = layout.heartbeat_file.read_bytes()
    layout.heartbeat_file.unlink()
    kept.beat()
    assert layout.heartbeat_file.read_bytes() == text
    age(layout.heartbeat_file, 3600)
    kept.beat()
    assert time.time() - layout.heartbeat_file.stat().st_mtime < 600
    layout.heartbeat_file.write_bytes(text + b" ")
    with pytest.raises(RunLocked, match=r"run a-run has been taken over by process \d+ on "):
        kept.beat()
    layout.heartbeat_file.write_bytes(b"[]")
    with pytest.raises(RunLocked, match=r"taken over by another process$"):
        kept.beat()
    kept.close()
    assert layout.heartbeat_file.read_bytes() == b"[]"


def test_newest_change_of_the_files_that_a_run_writes_counts(layout: RunLayout) -> None:
    assert liveness.changed_at(layout) == 0
    layout.logs_dir.mkdir()
    files = (layout.run_json, layout.log(3), layout.metrics_jsonl, layout.events_jsonl)
    for at_s, path in enumerate(files, 1_000):
        path.touch()
        os.utime(path, (at_s, at_s))
        assert liveness.changed_at(layout) == at_s
    layout.config_yaml.touch()
    assert liveness.changed_at(layout) == 1_003
