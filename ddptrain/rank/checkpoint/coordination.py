"""What ranks agree on without a collective, through the gang's store: when to save, and when to end.

A collective would have to come at the same moment in every rank, on the device, between the user's own; a key in the
store can be set and read at any time, from any thread.
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


class Preempted(SystemExit):
    """All ranks end here, with a checkpoint: the host is about to go. A clean end, not a failure."""

    def __init__(self) -> None:
        super().__init__(EXIT_PREEMPTED)


class GangStore:
    """The gang's store, for one rank: keys of this attempt; every thread has a connection of its own.

    A connection is busy while its owner waits for a key. All calls raise RuntimeError where the store is gone.
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
        """Whether a key is set; never waits for it."""
        return bool(self._connection().check([self._prefix + key]))

    def get(self, key: str) -> bytes:
        """A key's value; waits for it, for the gang's time-out at most."""
        value: bytes = self._connection().get(self._prefix + key)
        return value

    def wait(self, keys: Sequence[str]) -> None:
        """Wait until all of these keys are set, for the gang's time-out at most."""
        self._connection().wait([self._prefix + key for key in keys])

    def delete(self, key: str) -> None:
        """Forget a key."""
        self._connection().delete_key(self._prefix + key)

    def _connection(self) -> TCPStore:
        try:
            store: TCPStore = self._connections.store
        except AttributeError:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            store = TCPStore(*self._address, None, False, timeout=self._timeout, wait_for_workers=False)
            self._connections.store = store
        return store


class Calls:
    """Counts the calls of ctx.checkpoint, and agrees with the other ranks after which of them all end.

    Told to end, a rank publishes at once, from whatever thread, how many calls it has entered; all end with the call
    after the largest of these numbers, which none has entered yet.
    """

    def __init__(self, spec: RankSpec, store: GangStore) -> None:
        self._spec = spec
        self.store = store
        self._lock = threading.Lock()
        self._entered = 0
        self._last: float | None = None
        self.told_to_end = False
        self.saves = False  # whether the workload has resumed, or saved: else there is no call to wait for
        self.notified = False  # whether the order to end has come, for a workload that never saves as well
        self.seen = False  # whether the workload knows that it is to end
        self.complete = False  # whether it has saved its last step
        self.has_saved = bool(spec.checkpointing.resume_from)  # whether any attempt has saved a checkpoint

    @property
    def ends_early(self) -> bool:
        """Whether a workload that returns now does so because it is to end, before its work is done."""
        return self.seen and not self.complete

    def enter(self) -> int:
        """The number of the call that begins now, from 1."""
        with self._lock:
            self.saves = True
            self._entered += 1
            return self._entered

    def tell_to_end(self) -> None:
        """The notice has come; called in any thread, once or more often."""
        with self._lock:
            if self.told_to_end:
                return
            self.told_to_end = True
            entered = self._entered
            if self._spec.placement.world_size == 1:
                self._last = entered + 1
                return
        # In a thread: to reach a store that is gone takes its time, and the caller has other orders to hear.
        threading.Thread(target=self._publish, args=(entered,), name="ddptrain-publish", daemon=True).start()

    def _publish(self, entered: int) -> None:
        with contextlib.suppress(RuntimeError):  # a gang whose store is gone is being stopped
            self.store.set(f"end/{self._spec.rank}", str(entered))

    def is_last(self, number: int) -> bool:
        """Whether all ranks end with their call of that number."""
        if not self.told_to_end:
            return False
        if self._last is None:
            self._last = self._agree()
        return number >= self._last

    def _agree(self) -> float:
        """Every rank publishes within a moment of the notice; one that doesn't in grace_s has more to tell."""
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


class Due:
    """Which calls of ctx.checkpoint save: the same ones in every rank."""

    def __init__(self, spec: RankSpec, store: GangStore) -> None:
        self._every_epochs, self._every_steps = spec.checkpointing.every_epochs, spec.checkpointing.every_steps
        self._pace = Pace(spec, store, spec.checkpointing.every_s) if spec.checkpointing.every_s is not None else None
        self._always = spec.checkpointing.every_steps is None and spec.checkpointing.every_s is None
        self.step = 0

    def now(self, call: int, step: int, epoch: float | None) -> bool:
        """Whether this call saves: its epoch, its step, or the clock says so; or nothing could."""
        by_clock = self._pace is not None and self._pace.due(call)  # asked in every call: all ranks look at the same
        every, before = self._every_steps, self.step
        self.step = step
        if by_clock or (every is not None and step // every > before // every):
            return True
        if epoch is None:
            return self._always
        return self._every_epochs is not None and epoch == (whole := int(epoch)) and whole % self._every_epochs == 0

    def saved(self) -> None:
        """A checkpoint has been taken: the clock starts again."""
        if self._pace is not None:
            self._pace.restart()


class Pace:
    """Whether `every_s` seconds are over, as rank 0's clock has it.

    All ranks look in the same calls, and rank 0 says in each of them which is the next: half of those that the time
    left has room for, and never more than there were before, for the first calls tell little of those to come.
    """

    def __init__(self, spec: RankSpec, store: GangStore, every_s: float) -> None:
        self._leads, self._alone = spec.rank == 0, spec.placement.world_size == 1
        self._store = store
        self._every_s = every_s
        self._look_at = 1
        self._looked_at = 0
        self._looked_s = self._since_s = time.monotonic()

    def due(self, call: int) -> bool:
        """Whether all ranks save in their call of that number."""
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
        """The seconds count from now on."""
        self._since_s = time.monotonic()

    def _measure(self, call: int, now: float) -> bool:
        left_s = self._every_s - (now - self._since_s)
        is_due = left_s <= 0
        call_s = (now - self._looked_s) / (call - self._looked_at)
        room = (self._every_s if is_due else left_s) / max(call_s, 1e-9)
        self._looked_at, self._looked_s = call, now
        self._look_at = call + max(1, min(int(room / 2), call))
        return is_due
