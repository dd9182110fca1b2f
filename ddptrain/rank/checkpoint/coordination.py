"""How ranks agree, through the worker group's store, on when to save and when to end.

A collective would have to run at the same place in every rank, on the device, between the user's own collectives. A key
in the store can be set and read at any time, from any thread.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddptrain.protocol.rank_spec import RankSpec

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_POLL_S = 0.005
EXIT_PREEMPTED = 75


class PreemptedExit(SystemExit):
    """Ends a rank after the checkpoint of a preemption. It is a clean end, not a failure."""

    def __init__(self) -> None:
        super().__init__(EXIT_PREEMPTED)


class WorkerGroupStore:
    """The worker group's store (TCPStore) for one rank: keys of this attempt.

    Every thread has its own connection, because a connection is busy while it waits for a key. All calls raise
    RuntimeError if the store has ended.
    """

    def __init__(self, spec: RankSpec) -> None:
        self._address = (spec.group.master_addr, spec.group.master_port)
        self._timeout = dt.timedelta(seconds=spec.group.timeout_s)
        self._prefix = f"ddptrain/{spec.attempt}/"
        self._connections = threading.local()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._connection().set(self._prefix + key, value)  # type: ignore[arg-type]  # bytes are taken as they are

    def has(self, key: str) -> bool:
        """Return whether a key is set; does not wait."""
        return bool(self._connection().check([self._prefix + key]))

    def get(self, key: str) -> bytes:
        """Return the value of a key; waits until it is set, at most the time limit of the group."""
        value: bytes = self._connection().get(self._prefix + key)
        return value

    def wait(self, keys: Sequence[str]) -> None:
        """Wait until all of these keys are set, at most the time limit of the group."""
        self._connection().wait([self._prefix + key for key in keys])

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._connection().delete_key(self._prefix + key)

    def _connection(self) -> TCPStore:
        try:
            store: TCPStore = self._connections.store
        except AttributeError:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            store = TCPStore(*self._address, None, False, timeout=self._timeout, wait_for_workers=False)
            self._connections.store = store
        return store


class CheckpointCalls:
    """Counts the calls of ctx.checkpoint, and agrees with the other ranks on the last call of a preemption.

    When a rank receives the notice, it publishes at once how many calls it has entered. All ranks end with the call
    after the largest of these numbers, which no rank has entered yet.
    """

    def __init__(self, spec: RankSpec, store: WorkerGroupStore) -> None:
        self._spec = spec
        self.store = store
        self._lock = threading.Lock()
        self._entered = 0
        self._last: float | None = None
        self.told_to_end = False
        self.saves = False  # whether the workload has resumed or saved; if not, there is no call to wait for
        self.notified = False  # whether the notice has arrived, also for a workload that never saves
        self.seen = False  # whether the workload has read ctx.preempted after the notice
        self.complete = False  # whether it has saved its last step
        self.has_saved = bool(spec.checkpointing.resume_from)  # whether any attempt has saved a checkpoint

    @property
    def ends_early(self) -> bool:
        """Whether a workload that returns now returns because of the preemption, before its work is done."""
        return self.seen and not self.complete

    def enter(self) -> int:
        """Return the number of the call that begins now, from 1."""
        with self._lock:
            self.saves = True
            self._entered += 1
            return self._entered

    def tell_to_end(self) -> None:
        """Handle the notice of a preemption. May be called by any thread, and more than once."""
        with self._lock:
            if self.told_to_end:
                return
            self.told_to_end = True
            entered = self._entered
            if self._spec.placement.world_size == 1:
                self._last = entered + 1
                return
        # In a thread: a store that has ended delays the call, and the caller must read further commands.
        threading.Thread(target=self._publish, args=(entered,), name="ddptrain-publish", daemon=True).start()

    def _publish(self, entered: int) -> None:
        with contextlib.suppress(RuntimeError):  # without a store the worker group is being stopped
            self.store.set(f"end/{self._spec.rank}", str(entered))

    def is_last(self, number: int) -> bool:
        """Return whether all ranks end with their call of that number."""
        if not self.told_to_end:
            return False
        if self._last is None:
            self._last = self._agree()
        return number >= self._last

    def _agree(self) -> float:
        """Return the number of the last call; infinity if a rank does not publish its number within grace_s."""
        deadline = time.monotonic() + self._spec.supervision.grace_s
        keys = [f"end/{rank}" for rank in range(self._spec.placement.world_size)]
        try:
            while not all(map(self.store.has, keys)):
                if time.monotonic() > deadline:
                    return math.inf
                time.sleep(_POLL_S)
            return max(int(self.store.get(key)) for key in keys) + 1
        except RuntimeError:
            return math.inf


class SaveSchedule:
    """Decides which calls of ctx.checkpoint save; the result is the same in every rank."""

    def __init__(self, spec: RankSpec, store: WorkerGroupStore) -> None:
        self._every_epochs, self._every_steps = spec.checkpointing.every_epochs, spec.checkpointing.every_steps
        self._pace = (
            SaveInterval(spec, store, spec.checkpointing.every_s) if spec.checkpointing.every_s is not None else None
        )
        self._always = spec.checkpointing.every_steps is None and spec.checkpointing.every_s is None
        self.step = 0

    def now(self, call: int, step: int, epoch: float | None) -> bool:
        """Return whether this call saves: by its epoch, its step or the clock, or because none of these can decide."""
        # In every call, so that all ranks read the same keys.
        by_clock = self._pace is not None and self._pace.due(call)
        every, before = self._every_steps, self.step
        self.step = step
        if by_clock or (every is not None and step // every > before // every):
            return True
        if epoch is None:
            return self._always
        return self._every_epochs is not None and epoch == (whole := int(epoch)) and whole % self._every_epochs == 0

    def saved(self) -> None:
        """Restart the clock after a checkpoint."""
        if self._pace is not None:
            self._pace.restart()


class SaveInterval:
    """Decides by rank 0's clock whether `every_s` seconds have passed since the last checkpoint.

    All ranks compare in the same calls. In each of them rank 0 chooses the next one: after half of the calls that fit
    into the remaining time, but not more calls than before, because the first calls say little about later ones.
    """

    def __init__(self, spec: RankSpec, store: WorkerGroupStore, every_s: float) -> None:
        self._leads, self._alone = spec.rank == 0, spec.placement.world_size == 1
        self._store = store
        self._every_s = every_s
        self._look_at = 1
        self._looked_at = 0
        self._looked_s = self._since_s = time.monotonic()

    def due(self, call: int) -> bool:
        """Return whether all ranks save in their call of that number."""
        if call < self._look_at:
            return False
        if not self._leads:
            due, look_at = self._store.get(f"pace/{call}").split()
            self._look_at = int(look_at)
            return due == b"1"
        is_due = self._measure(call, time.monotonic())
        if not self._alone:
            self._store.set(f"pace/{call}", f"{int(is_due)} {self._look_at}")
        return is_due

    def restart(self) -> None:
        """Count the seconds from now on."""
        self._since_s = time.monotonic()

    def _measure(self, call: int, now: float) -> bool:
        left_s = self._every_s - (now - self._since_s)
        is_due = left_s <= 0
        call_s = (now - self._looked_s) / (call - self._looked_at)
        room = (self._every_s if is_due else left_s) / max(call_s, 1e-9)
        self._looked_at, self._looked_s = call, now
        self._look_at = call + max(1, min(int(room / 2), call))
        return is_due
