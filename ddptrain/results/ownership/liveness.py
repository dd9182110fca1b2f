"""Decides whether the driver of a run is alive, for all commands that show, resume, sync or stop runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ddptrain import file_ops
from ddptrain.host_identity import is_this_host
from ddptrain.results.layout import RunLayout
from ddptrain.results.ownership import driver_heartbeat
from ddptrain.results.ownership import run_lock as lock
from ddptrain.results.ownership.driver_heartbeat import HeartbeatState
from ddptrain.results.ownership.run_lock import LockState
from ddptrain.results.run_record import DriverRecord

# For a run without a heartbeat: run.json is rewritten every second while metrics arrive, but an epoch may be long.
QUIET_AFTER_S = 600.0


class Liveness(Enum):
    """Whether the driver of a run whose run.json says `running` is alive."""

    RUNNING = "running"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Signs:
    """What this host sees of a driver.

    is_here: the driver was started on this host, after its last boot.
    quiet_s: seconds since any file of the run changed.
    """

    lock: LockState
    is_here: bool
    heartbeat: HeartbeatState
    quiet_s: float


def decide(signs: Signs) -> Liveness:
    """Return whether the driver is alive.

    A held lock decides, and so does a free lock if the driver was started on this host. Otherwise the heartbeat
    decides, and without a heartbeat the age of the files.
    """
    if signs.lock is LockState.HELD:
        return Liveness.RUNNING
    if signs.lock is LockState.FREE and signs.is_here:
        return Liveness.GONE
    if signs.heartbeat is not HeartbeatState.NONE:
        return Liveness.RUNNING if signs.heartbeat is HeartbeatState.BEATING else Liveness.GONE
    return Liveness.RUNNING if signs.quiet_s <= QUIET_AFTER_S else Liveness.UNKNOWN


def look(layout: RunLayout, driver: DriverRecord, *, is_ours: bool = False) -> Liveness:
    """Return whether the driver of a run is alive, as far as this host can see.

    is_ours: this process holds the lock, so the driver does not hold it, or the file system does not show locks.
    """
    is_here = is_this_host(driver.host, driver.boot_id)
    lock_state = LockState.FREE if is_ours else lock.look(layout.lock_file)
    settled = lock_state is LockState.HELD or (lock_state is LockState.FREE and is_here)
    if settled:
        return decide(Signs(lock_state, is_here, HeartbeatState.NONE, quiet_s=0.0))
    quiet_s = file_ops.time_in(layout.root) - changed_at(layout)
    return decide(Signs(lock_state, is_here, driver_heartbeat.look(layout.heartbeat_file), quiet_s))


def changed_at(layout: RunLayout) -> float:
    """Return when a file of the run changed last, in seconds since 1970; 0 if there is none."""
    return max(_times((layout.run_json, layout.events_jsonl, layout.metrics_jsonl, *layout.logs().values())), default=0)


def _times(paths: Iterable[Path]) -> Iterable[float]:
    for path in paths:
        try:
            yield path.lstat().st_mtime
        except OSError:
            continue
