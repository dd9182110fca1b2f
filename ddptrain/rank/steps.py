"""Measures steps and waits for data, and warns if ranks exchange no gradients."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddptrain.rank.agreement import GROUP_NAME
from ddptrain.rank.output import Emitter

_EVERY_STEPS, _EVERY_S = 20, 10.0
_WARM_UP_STEPS = 3  # they allocate memory and compile
_FIRST_PAUSE_S, _MAX_PAUSE_S, _LONGER = 0.2, 5.0, 1.3
_KEPT = 7  # steps of which the median wait is taken


class _Step(NamedTuple):
    """A step that DDP has measured: its number, when it ended by this host's clock, and the wait for other ranks."""

    number: int
    ended_s: float
    waited_s: float


def report_steps(emitter: Emitter, world_size: int, first_step: Callable[[], None]) -> None:
    """Report for how long this rank waits for others in steps of the newest DistributedDataParallel over all ranks.

    first_step: called after the first step.
    """
    newest: list[weakref.ref[DistributedDataParallel]] = []

    def note(owner: nn.Module, *_: Any) -> None:
        if isinstance(owner, DistributedDataParallel):  # which registers the user's model as its only module
            is_first, newest[:] = not newest, [weakref.ref(owner)]
            if is_first:
                threading.Thread(target=report, name="ddptrain-steps", daemon=True).start()

    def report() -> None:
        before: _Step | None = None
        waits: deque[float] = deque(maxlen=_KEPT)
        pause_s, every = _FIRST_PAUSE_S, _EVERY_STEPS
        while True:
            time.sleep(pause_s)
            step = _newest_step(newest[0](), world_size, every)
            if step is None or (before is not None and step.number == before.number):
                continue
            pause_s = min(_LONGER * pause_s, _MAX_PAUSE_S)
            if before is None:
                first_step()
            if before is not None and step.number > before.number > _WARM_UP_STEPS:
                count = step.number - before.number
                step_s = (step.ended_s - before.ended_s) / count
                every = max(1, min(_EVERY_STEPS, int(_EVERY_S / step_s)))
                waits.append(step.waited_s)
                emitter.timed("ranks", count * median(waits))
            before = step

    register_module_module_registration_hook(note)


def _newest_step(model: DistributedDataParallel | None, world_size: int, every: int) -> _Step | None:
    """Return the last step that DDP has measured, one of `every`; None before the first, or not of all ranks."""
    if model is None or getattr(model, "logger", None) is None:
        return None  # it is being created, or has torch's reducer in Python
    model._set_ddp_runtime_logging_sample_rate(every)  # noqa: SLF001  # there is no public function
    data: dict[str, Any] = model._get_ddp_logging_data()  # noqa: SLF001  # as above
    if data["world_size"] != world_size or not data.get("backward_comm_time"):
        return None
    waited_ns = data["backward_comm_time"] - data["backward_compute_comm_overlap_time"]
    return _Step(data["iteration"], data["backward_comm_time_end"] / 1e9, max(0, waited_ns) / 1e9)


_REPORT_S = 10.0  # from one report of waits to the next


class WaitingTime:
    """Sums up the waits of this process for data; reports them, and the first step, as timed activities."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self._seconds = 0.0
        self._began = self._reported_at = time.monotonic()

    def add(self, seconds: float) -> None:
        """Add a wait for data that has just ended."""
        self._seconds += seconds
        if time.monotonic() - self._reported_at >= _REPORT_S:
            self.flush()

    def first_step(self) -> None:
        """Report the time until the end of the first step, which has just ended. It includes compilation."""
        self._emitter.timed("first step", time.monotonic() - self._began)

    def flush(self) -> None:
        """Report the waits since the last report."""
        self._reported_at = time.monotonic()
        self._emitter.timed("data", self._seconds)
        self._seconds = 0.0


def measure_data(waiting: WaitingTime) -> None:
    """Measure how long the main thread waits for each batch of torch's DataLoaders, also in scripts."""
    from torch.utils.data import dataloader

    base: Any = getattr(dataloader, "_BaseDataLoaderIter", None)
    if base is None:  # another version of torch: the wait counts as training
        return
    next_batch = base.__next__

    @functools.wraps(next_batch)
    def measured(self: Any) -> Any:
        began = time.monotonic()
        try:
            return next_batch(self)
        finally:
            if threading.get_ident() == threading.main_thread().ident:
                waiting.add(time.monotonic() - began)

    base.__next__ = measured


_STEPS = 30


def warn_without_exchange(emitter: Emitter) -> None:
    """Emit one warning if the first optimizer takes 30 steps without a collective operation between them."""
    first: torch.optim.Optimizer | None = None
    steps, begun = 0, 0

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal first, steps, begun
        if torch.compiler.is_compiling() or steps > _STEPS or optimizer is not (first or optimizer):
            return
        if first is None:
            first, begun = optimizer, _begun_operations()
        steps += 1
        if steps <= _STEPS:
            return
        first = None
        if _begun_operations() == begun:
            text = (
                f"in {_STEPS} steps of the optimizer the ranks have exchanged no gradients: each rank trains alone; "
                "use model = ctx.prepare(model), or DistributedDataParallel"
            )
            emitter.note(text, "warning")

    register_optimizer_step_post_hook(count)


def _begun_operations() -> int:
    """Return how many collective operations this rank has begun, without those of ctx.mean; -1 if not known."""
    try:
        groups: list[Any] = list(c10d._world.pg_map)  # noqa: SLF001  # there is no public function
        return sum(group._get_sequence_number_for_group() for group in groups if group.group_desc != GROUP_NAME)  # noqa: SLF001
    except RuntimeError:  # a backend that does not count
        return -1
