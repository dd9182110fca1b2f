"""Measures the first step and waits for data, and warns if ranks exchange no gradients."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddptrain.rank.agreement import GROUP_NAME
from ddptrain.rank.output import Emitter

_REPORT_S = 10.0  # from one report of waits to the next


class WaitingTime:
    """Sums up the waits of this process for data; reports them as timed activities."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self._seconds = 0.0
        self._reported_at = time.monotonic()

    def add(self, seconds: float) -> None:
        """Add a wait for data that has just ended."""
        self._seconds += seconds
        if time.monotonic() - self._reported_at >= _REPORT_S:
            self.flush()

    def flush(self) -> None:
        """Report the waits since the last report."""
        self._reported_at = time.monotonic()
        self._emitter.timed("data", self._seconds)
        self._seconds = 0.0


def report_first_step(emitter: Emitter) -> None:
    """Report the time from now until an optimizer has taken its first step, which includes compilation."""
    began, is_reported = time.monotonic(), False

    def report(*_: Any) -> None:  # stays, because torch iterates over the hooks
        nonlocal is_reported
        if not is_reported and not torch.compiler.is_compiling():
            is_reported = True
            emitter.timed("first step", time.monotonic() - began)

    register_optimizer_step_post_hook(report)


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
