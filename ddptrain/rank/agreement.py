"""How ranks agree, through the store of the worker group, on when to save and when to end."""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from ddptrain.protocol.rank_spec import RankSpec

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_POLL_S = 0.005
EXIT_PREEMPTED = 75


class PreemptedExit(SystemExit):
    """Ends a rank after the checkpoint of a preemption. It is a clean end, not a failure."""

    def __init__(self) -> None:
        super().__init__(EXIT_PREEMPTED)


class WorkerGroupStore:
    """One rank's client of the worker group's store (TCPStore); keys are those of this attempt.

    Every thread has its own connection, because a connection is busy while it waits for a key. All calls raise
    RuntimeError if the store has ended.
    """

    def __init__(self, spec: RankSpec) -> None:
        self._address = (spec.group.master_addr, spec.group.master_port)
        self._timeout = dt.timedelta(seconds=spec.group.timeout_s)
        self._prefix = f"ddptrain/{spec.attempt}/"
        self._rank, self._world_size = spec.rank, spec.placement.world_size
        self._meetings: Counter[str] = Counter()
        self._connections = threading.local()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._connection().set(self._prefix + key, value)  # type: ignore[arg-type]  # the stub lacks bytes

    def has(self, key: str) -> bool:
        """Return whether a key is set, without waiting."""
        return bool(self._connection().check([self._prefix + key]))

    def get(self, key: str) -> bytes:
        """Wait until a key is set, at most the time limit of the group; return its value."""
        value: bytes = self._connection().get(self._prefix + key)
        return value

    def meet(self, method: str) -> None:
        """Wait until all ranks have called a ctx method as often as this rank, at most the time limit of the group.

        Raises RuntimeError, which names the other ranks.
        """
        if self._world_size == 1:
            return
        self._meetings[method] += 1
        keys = [f"met/{method}/{self._meetings[method]}/{rank}" for rank in range(self._world_size)]
        self.set(keys[self._rank], "")
        try:
            self._connection().wait([self._prefix + key for key in keys])
        except RuntimeError as error:
            missing = [str(rank) for rank, key in enumerate(keys) if not self.has(key)]
            text = f"ctx.{method}: not called by rank {', '.join(missing)} within {self._timeout.total_seconds():g} s"
            raise RuntimeError(f"{text}; all ranks must call it") from error

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
        self.told_to_end = False  # whether the ranks agree on a last call
        self.saves = False  # whether the workload resumes, saves or reads ctx.preempted; if not, it is stopped at once
        self.notified = False  # whether the notice has arrived, also for a workload that never saves
        self.read_preempted = False  # whether the workload has read ctx.preempted after the notice
        self.complete = False  # whether the last call had last=True
        self.has_saved = bool(spec.checkpointing.resume_from)  # whether any attempt has saved a checkpoint

    @property
    def ends_early(self) -> bool:
        """Whether a workload that returns now does so because of the preemption, before its work is complete."""
        return self.read_preempted and not self.complete

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
        # In a thread, because a store that has ended delays the call, and the caller must read further commands.
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
        self._interval = (
            SaveInterval(spec, store, spec.checkpointing.every_s) if spec.checkpointing.every_s is not None else None
        )
        self._always = spec.checkpointing.every_steps is None and spec.checkpointing.every_s is None
        self.step = 0

    def now(self, call: int, step: int, epoch: float | None) -> bool:
        """Return whether this call saves: because of its epoch, step or time, or because no setting applies to it."""
        # This runs in every call, so that all ranks read the same keys.
        by_clock = self._interval is not None and self._interval.due(call)
        every, before = self._every_steps, self.step
        self.step = step
        if by_clock or (every is not None and step // every > before // every):
            return True
        if epoch is None:
            return self._always
        return self._every_epochs is not None and epoch == (whole := int(epoch)) and whole % self._every_epochs == 0

    def saved(self) -> None:
        """Restart the clock after a checkpoint."""
        if self._interval is not None:
            self._interval.restart()


class SaveInterval:
    """Decides by rank 0's clock whether `every_s` seconds have passed since the last checkpoint.

    All ranks check in the same calls. In each check rank 0 chooses the call of the next check: after half of the calls
    that fit into the remaining time, but at most twice the current number, because the first calls may be slower.
    """

    def __init__(self, spec: RankSpec, store: WorkerGroupStore, every_s: float) -> None:
        self._is_rank_zero, self._is_only_rank = spec.rank == 0, spec.placement.world_size == 1
        self._store = store
        self._every_s = every_s
        self._next_check = 1
        self._checked_call = 0
        self._checked_s = self._since_s = time.monotonic()

    def due(self, call: int) -> bool:
        """Return whether all ranks save in their call of that number."""
        if call < self._next_check:
            return False
        if not self._is_rank_zero:
            due, next_check = self._store.get(f"pace/{call}").split()
            self._next_check = int(next_check)
            return due == b"1"
        is_due = self._measure(call, time.monotonic())
        if not self._is_only_rank:
            self._store.set(f"pace/{call}", f"{int(is_due)} {self._next_check}")
        return is_due

    def restart(self) -> None:
        """Measure `every_s` from now on."""
        self._since_s = time.monotonic()

    def _measure(self, call: int, now: float) -> bool:
        left_s = self._every_s - (now - self._since_s)
        is_due = left_s <= 0
        call_s = (now - self._checked_s) / (call - self._checked_call)
        room = (self._every_s if is_due else left_s) / max(call_s, 1e-9)
        self._checked_call, self._checked_s = call, now
        self._next_check = call + max(1, min(int(room / 2), call))
        return is_due


GROUP_NAME = "ddptrain"  # the description of the process group
_CODES = {"mean": 1.0, "all_finite": 2.0}  # ranks compare these codes, to notice that they are in different calls


class CollectiveValues:
    """One rank's part of the computations. The first call creates the process group, on the CPU.

    torch is imported by the calls: the rank server imports this module also where its ranks are new processes.
    """

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._group: Any = None

    def mean(self, value: float | torch.Tensor, weight: float) -> float:
        """Return the mean over all ranks, each with its `weight`; NaN if all weights are 0."""
        import torch

        number = value.detach().double().mean().item() if isinstance(value, torch.Tensor) else float(value)
        total, weights = self._sum("mean", number * weight, weight)
        return total / weights if weights else float("nan")

    def all_finite(self, value: float | torch.Tensor) -> bool:
        """Return whether all numbers of all ranks are finite: the same result on all ranks."""
        import torch

        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        (bad, _) = self._sum("all_finite", float(not bool(torch.isfinite(tensor).all())), 0.0)
        return not bad

    def _sum(self, name: str, first: float, second: float) -> tuple[float, float]:
        """Return the sums of both numbers over all ranks. Raises RuntimeError if ranks are in different calls."""
        import torch
        from torch import distributed

        code = _CODES[name]
        sums = torch.tensor([code, code * code, first, second], dtype=torch.float64)
        if self._group is None:
            timeout = dt.timedelta(seconds=self._spec.group.timeout_s)
            self._group = distributed.new_group(backend="gloo", timeout=timeout, group_desc=GROUP_NAME)
        distributed.all_reduce(sums, group=self._group)
        size = self._spec.placement.world_size
        if sums[:2].tolist() != [size * code, size * code * code]:
            raise RuntimeError(
                f"rank {self._spec.rank} is in ctx.{name}, other ranks are in another call: "
                "all ranks must call ctx.mean and ctx.all_finite in the same order"
            )
        return float(sums[2]), float(sums[3])
