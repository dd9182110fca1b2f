"""Numbers over all ranks: ctx.mean and ctx.all_finite, in a process group of their own.

In the default group a call that other ranks do not make would meet their next gradient reduction there, and both would
read wrong bytes. In a group of its own it waits, which is found out and told (see gang_calls.py).
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import torch
from torch import distributed

from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.collective.calls import GangCalls

_CODES = {"mean": 1.0, "all_finite": 2.0}  # so that ranks notice when they are in different calls


class Exchange:
    """One rank's; the group is made in the first call, on the CPU, as the numbers are plain ones."""

    def __init__(self, spec: RankSpec, calls: GangCalls) -> None:
        self._spec, self._calls = spec, calls
        self._group: Any = None

    def mean(self, value: float | torch.Tensor, weight: float) -> float:
        """The mean over all ranks, each of which counts `weight`; NaN where all weights are 0."""
        number = value.detach().double().mean().item() if isinstance(value, torch.Tensor) else float(value)
        total, weights = self._summed("mean", number * weight, weight)
        return total / weights if weights else float("nan")

    def all_finite(self, value: float | torch.Tensor) -> bool:
        """Whether every number of every rank is finite; the same answer on all ranks."""
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        (bad, _) = self._summed("all_finite", float(not bool(torch.isfinite(tensor).all())), 0.0)
        return not bad

    def _summed(self, name: str, first: float, second: float) -> tuple[float, float]:
        """Both numbers, summed over all ranks. Raises RuntimeError where ranks are in different calls."""
        self._calls.enter(name)
        code = _CODES[name]
        sums = torch.tensor([code, code * code, first, second], dtype=torch.float64)
        with self._calls.waiting(name):
            if self._group is None:
                timeout = dt.timedelta(seconds=self._spec.group.timeout_s)
                self._group = distributed.new_group(backend="gloo", timeout=timeout)
            distributed.all_reduce(sums, group=self._group)
        size = self._spec.placement.world_size
        if sums[:2].tolist() != [size * code, size * code * code]:
            raise RuntimeError(
                f"rank {self._spec.rank} is in ctx.{name}, other ranks are in another call: "
                "all ranks must call ctx.mean and ctx.all_finite in the same order"
            )
        return float(sums[2]), float(sums[3])
