"""How ranks agree: through the store of the worker group on when to save and when to end, by a collective on numbers.

The keys of the store, below ddptrain/<attempt>/; <r> is a rank:

    key                   written by                                      read by
    met/<method>/<n>/<r>  rank r in its n-th call of the ctx method       all ranks, which wait for those of all ranks
    save/<n>              rank 0 in its n-th call of ctx.checkpoint,      the other ranks in the same call
                          if it looks at its clock there
    end/<r>               rank r, when it is asked to end                 all ranks in their next call of ctx.checkpoint
    state/<n>/<r>         rank r for the n-th checkpoint                  the writer of rank 0, which deletes it
    done/<r>              rank r, when its workload has returned          the writer of rank 0: no state will follow
    early/<place>/<n>     rank 0 where ranks may end early, see Patience  the other ranks in the same place
"""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddptrain.config.wording import listed, nearest
from ddptrain.protocol.events import StoppedEarly
from ddptrain.protocol.rank_spec import RankSpec

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ddptrain.config.run_config import StopEarlyConfig

_POLL_S, _MAX_POLL_S = 0.005, 0.2  # longer and longer: a rank that waits must not look as if it worked
_LATE_S = 0.5  # while the worker group is being stopped, another rank may be this much later than rank 0
_MOST_NAMES = 20
EXIT_PREEMPTED = 75


class PreemptedExit(SystemExit):
    """Ends a rank after the checkpoint of a preemption. It is a clean end, not a failure."""

    def __init__(self) -> None:
        super().__init__(EXIT_PREEMPTED)


class Agreement:
    """One rank's part in the decisions of all ranks. The methods for the store raise RuntimeError if it has ended.

    Calls of ctx.checkpoint save at epochs, at steps, or after seconds by rank 0's clock. In some calls, which are the
    same on all ranks, rank 0 looks at its clock, and chooses the call in which it looks again: after half of the calls
    that fit into the remaining time, but at most twice the current number, because the first calls may be slower.

    A rank that is asked to end publishes at once how many calls it has entered. All ranks end with the call after the
    largest of these numbers, which no rank has entered yet.
    """

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._rank, self._world_size = spec.rank, spec.placement.world_size
        self._timeout = dt.timedelta(seconds=spec.group.timeout_s)
        self._connections = threading.local()  # each thread has its own, which is busy while it waits for a key
        self._met: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._entered = 0
        self._last: float | None = None  # the call with which all ranks end
        self._next_look = 1
        self._looked_call = 0
        self._looked_s = self._saved_s = time.monotonic()
        self.step = 0  # of the newest call of ctx.checkpoint, or of the checkpoint that was loaded
        self.asked_to_end = False  # whether the ranks agree on a last call
        self.saves = False  # whether the workload resumes, saves or reads ctx.preempted; if not, it is stopped at once
        self.notified = False  # whether the notice has arrived, also for a workload that never saves
        self.read_preempted = False  # whether the workload has read ctx.preempted after the notice
        self.complete = False  # whether the last call had last=True
        self.has_saved = bool(spec.resume_from)  # whether any attempt has saved a checkpoint
        early = spec.config.stop_early
        self.patience = Patience(early) if early is not None else None
        self.counts_epochs = False  # the workload is in a loop over ctx.epochs, which ends early
        self._places: Counter[str] = Counter()  # of calls of stops_early
        self._stops = False  # a checkpoint was saved since training should end
        self._skipped = False  # the last call of ctx.checkpoint has saved nothing, and none since training should end

    @property
    def ends_early(self) -> bool:
        """Whether a workload that returns now does so because of the preemption, before its work is complete."""
        return self.read_preempted and not self.complete

    def meet(self, method: str) -> None:
        """Wait until all ranks have called a ctx method as often as this rank, at most the time limit of the group.

        Raises RuntimeError, which names the other ranks.
        """
        if self._world_size == 1:
            return
        self._met[method] += 1
        keys = [self._key(f"met/{method}/{self._met[method]}/{rank}") for rank in range(self._world_size)]
        self._store.set(keys[self._rank], "")
        try:
            self._store.wait(keys)
        except RuntimeError as error:
            missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            text = f"ctx.{method}: not called by rank {', '.join(missing)} within {self._timeout.total_seconds():g} s"
            raise RuntimeError(f"{text}; all ranks must call it") from error

    # --- when to save ---

    def call(self, step: int, epoch: float | None, *, last: bool) -> tuple[bool, bool, bool]:
        """Count a call of ctx.checkpoint: the same result on all ranks.

        Return whether it saves, whether all ranks end with it, and whether training ends early after it.
        """
        with self._lock:
            self.saves = True
            self._entered += 1
            number = self._entered
        self.complete = last
        due = self._is_due(number, step, epoch)
        ends = self.asked_to_end and self._is_last(number)
        due = due or last or ends
        is_whole = epoch is not None and epoch == int(epoch)
        stops = (due or is_whole) and self.stops_early("checkpoint")
        self._stops = self._stops or stops
        self._skipped = not (due or self._stops)
        return due or stops, ends, stops and not (ends or last)

    def stops_early(self, place: str) -> bool:
        """Return whether training ends here because of stop_early: equal on all ranks, which call it equally often."""
        if self.patience is None:
            return False
        self._places[place] += 1
        key, ends = self._key(f"early/{place}/{self._places[place]}"), self.patience.is_over
        if self._world_size == 1:
            return ends
        if self._rank == 0:
            self._store.set(key, str(int(ends)))
            return ends
        return bool(self._store.get(key) == b"1")

    def no_early_stop(self) -> str:
        """Return why stop_early had no effect although it should have, or ""."""
        return self.patience.problem(could_end=bool(self._places)) if self.patience is not None else ""

    def ends_epochs(self) -> bool:
        """Return whether the loop over ctx.epochs ends early, before its next epoch: not without a checkpoint."""
        self._stops = (over := self.stops_early("epochs")) and self._stops
        return over and not self._skipped

    def _is_due(self, number: int, step: int, epoch: float | None) -> bool:
        when = self._spec.config.checkpoint
        # In every call, so that all ranks read the same keys.
        by_clock = when.every_s is not None and number >= self._next_look and self._look(number, when.every_s)
        before, self.step = self.step, step
        if by_clock or (when.every_steps is not None and step // when.every_steps > before // when.every_steps):
            return True
        if epoch is None:
            return when.every_steps is None and when.every_s is None
        return when.every_epochs is not None and epoch == int(epoch) and int(epoch) % when.every_epochs == 0

    def _look(self, number: int, every_s: float) -> bool:
        """Return whether `every_s` seconds have passed by rank 0's clock; set the call of the next look."""
        key = self._key(f"save/{number}")
        if self._rank != 0:
            due, look = self._store.get(key).split()
            self._next_look = int(look)
            return bool(due == b"1")
        now = time.monotonic()
        left_s = every_s - (now - self._saved_s)
        call_s = max((now - self._looked_s) / (number - self._looked_call), 1e-9)
        fitting = (left_s if left_s > 0 else every_s) / call_s
        self._looked_call, self._looked_s = number, now
        self._next_look = number + max(1, min(int(fitting / 2), number))
        if self._world_size > 1:
            self._store.set(key, f"{int(left_s <= 0)} {self._next_look}")
        return left_s <= 0

    def saved(self) -> None:
        """Measure the seconds from now on, after a checkpoint."""
        self._saved_s = time.monotonic()

    # --- when to end ---

    def end(self) -> None:
        """Handle the notice of a preemption. May be called by any thread, and more than once."""
        with self._lock:
            if self.asked_to_end:
                return
            self.asked_to_end = True
            entered = self._entered
            if self._world_size == 1:
                self._last = entered + 1
                return

        def publish() -> None:
            with contextlib.suppress(RuntimeError):  # without a store the worker group is being stopped
                self._store.set(self._key(f"end/{self._rank}"), str(entered))

        # In a thread, because a store that has ended delays the call, and the caller must read further commands.
        threading.Thread(target=publish, name="ddptrain-publish", daemon=True).start()

    def _is_last(self, number: int) -> bool:
        if self._last is None:
            self._last = self._agree()
        return number >= self._last

    def _agree(self) -> float:
        """Return the number of the last call; infinity if a rank does not publish its number within grace_s."""
        deadline = time.monotonic() + self._spec.config.failure.grace_s
        keys = [self._key(f"end/{rank}") for rank in range(self._world_size)]
        try:
            while not self._store.check(keys):
                if time.monotonic() > deadline:
                    return math.inf
                time.sleep(_POLL_S)
            return max(int(self._store.get(key)) for key in keys) + 1
        except RuntimeError:
            return math.inf

    # --- what rank 0 saves for the other ranks ---

    def give_state(self, checkpoint: int, state: bytes) -> None:
        """Give rank 0 this rank's part of the `checkpoint`-th checkpoint of this attempt."""
        self._store.set(self._key(f"state/{checkpoint}/{self._rank}"), state)  # type: ignore[arg-type]  # the stub lacks bytes

    def give_no_more(self) -> None:
        """Let rank 0 wait for no further state of this rank."""
        self._store.set(self._key(f"done/{self._rank}"), "")

    def states(self, checkpoint: int, hurry: threading.Event) -> list[bytes | None]:
        """Return what the ranks 1, 2, ... have given, None for a rank that has not called ctx.checkpoint.

        hurry: set while the worker group is being stopped: then late ranks are waited for only for a short time.
        Raises TimeoutError if a rank is late then, and may still come.
        """
        deadline = time.monotonic() + self._spec.group.timeout_s
        return [self._state(checkpoint, rank, deadline, hurry) for rank in range(1, self._world_size)]

    def _state(self, checkpoint: int, rank: int, deadline: float, hurry: threading.Event) -> bytes | None:
        key, done = self._key(f"state/{checkpoint}/{rank}"), self._key(f"done/{rank}")
        pause_s = _POLL_S
        while True:
            gives_no_more = self._store.check([done])
            if self._store.check([key]):  # tested last, because a rank gives its state before it gives no more
                break
            if gives_no_more:
                return None
            if hurry.is_set():
                deadline = min(deadline, time.monotonic() + _LATE_S)
            if time.monotonic() > deadline:
                if hurry.is_set():
                    raise TimeoutError
                return None
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _MAX_POLL_S)
        state: bytes = self._store.get(key)
        self._store.delete_key(key)
        return state

    def _key(self, name: str) -> str:
        return f"ddptrain/{self._spec.attempt}/{name}"

    @property
    def _store(self) -> TCPStore:
        """The connection of this thread to the store."""
        try:
            store: TCPStore = self._connections.store
        except AttributeError:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            address = self._spec.group.master_addr, self._spec.group.master_port
            store = TCPStore(*address, None, False, timeout=self._timeout, wait_for_workers=False)
            self._connections.store = store
        return store


@dataclass(slots=True)
class Patience:
    """Section stop_early on rank 0: whether the metric improves. Fields are saved in checkpoints, except `settings`.

    best: the best value so far, at `step` and `epoch`. waited: values since then. last: where the last value came from,
    and the value; those of ctx.checkpoint count only until ctx.log has given one.
    """

    settings: StopEarlyConfig
    best: float | None = None
    step: int | None = None
    epoch: float | None = None
    waited: int = 0
    last: tuple[str, float] = ("", math.nan)
    names: set[str] = field(default_factory=set)  # of the first values that were logged

    @property
    def is_over(self) -> bool:
        """Whether training should end."""
        return self.waited >= self.settings.patience

    def add(self, source: str, values: Mapping[str, float], step: int | None, epoch: float | None) -> None:
        """Count a value of the metric, if `values` has one; NaN is no improvement."""
        if (value := values.get(str(self.settings.metric))) is None:
            if len(self.names) < _MOST_NAMES:
                self.names |= values.keys()
            return
        (before, earlier), is_log = self.last, source == "log"
        if before == "log" and not is_log:
            return
        self.last = source, value
        if is_log and before == "checkpoint" and earlier == value:
            return
        sign = -1.0 if self.settings.mode == "max" else 1.0
        is_better = self.best is None or sign * (self.best - value) > self.settings.min_delta
        if is_better and not math.isnan(value):
            self.best, self.step, self.epoch, self.waited = value, step, epoch, 0
        else:
            self.waited += 1

    def end(self) -> StoppedEarly:
        """Return the event for the end of training."""
        best = math.nan if self.best is None else self.best
        return StoppedEarly(time.time_ns(), str(self.settings.metric), best, self.waited, self.step, self.epoch)

    def problem(self, *, could_end: bool) -> str:
        """Return why it had no effect although it should have, or "". could_end: ranks have agreed on it."""
        if not self.last[0] and self.best is None:
            logged = listed(sorted(self.names), _MOST_NAMES, 60) or "nothing"
            guess = nearest(str(self.settings.metric), self.names)
            hint = f" (did you mean {guess}?)" if guess else ""
            return f"stop_early had no effect: rank 0 has never logged {self.settings.metric}{hint}, but {logged}"
        if self.is_over and not could_end:
            return "stop_early had no effect: the code calls neither ctx.epochs nor ctx.checkpoint, where training ends"
        return ""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"metric": self.settings.metric, "best": self.best, "step": self.step, "epoch": self.epoch} | {
            "waited": self.waited
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what a checkpoint has kept, if it is of the same metric."""
        if state is not None and state["metric"] == self.settings.metric:
            self.best, self.step, self.epoch = state["best"], state["step"], state["epoch"]
            self.waited = state["waited"]


GROUP_NAME = "ddptrain"  # the description of the process group


class CollectiveValues:
    """ctx.mean and ctx.all_finite, in a gloo group of their own: numbers of a CPU need no device."""

    def __init__(self, spec: RankSpec) -> None:
        self._rank, self._size = spec.rank, spec.placement.world_size
        self._timeout = dt.timedelta(seconds=spec.group.timeout_s)
        self._group: Any = None

    def mean(self, value: float | torch.Tensor, weight: float) -> float:
        """Return the mean over all ranks, each with its `weight`; NaN if all weights are 0."""
        number = value.detach().double().mean().item() if hasattr(value, "detach") else float(value)
        total, weights = self._sum("mean", number * weight, weight)
        return total / weights if weights else float("nan")

    def all_finite(self, value: float | torch.Tensor) -> bool:
        """Return whether all numbers of all ranks are finite: the same result on all ranks."""
        finite = value.detach().isfinite().all().item() if hasattr(value, "detach") else math.isfinite(value)
        return not self._sum("all_finite", float(not finite), 0.0)[0]

    def _sum(self, name: str, first: float, second: float) -> tuple[float, float]:
        """Return the sums of both numbers over all ranks. Raises RuntimeError if ranks are in different calls."""
        import torch
        from torch import distributed

        in_mean = float(name == "mean")  # sent as well: ranks in different calls get an error, not mixed numbers
        sums = torch.tensor([in_mean, first, second], dtype=torch.float64)
        if self._group is None:
            self._group = distributed.new_group(backend="gloo", timeout=self._timeout, group_desc=GROUP_NAME)
        distributed.all_reduce(sums, group=self._group)
        if sums[0] != in_mean * self._size:
            raise RuntimeError(
                f"rank {self._rank} is in ctx.{name}, other ranks are in another call: "
                "all ranks must call ctx.mean and ctx.all_finite in the same order"
            )
        return float(sums[1]), float(sums[2])
