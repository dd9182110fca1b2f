"""Values that all ranks compute together (ctx.mean and ctx.all_finite), in a separate process group.

In the default group, a call that other ranks do not make would meet their next gradient reduction, and both would read
wrong data. In a separate group the call waits, and the driver reports the hang.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import torch
from torch import distributed

from ddptrain.protocol.rank_spec import RankSpec

GROUP_NAME = "ddptrain"  # the description of the process group
_CODES = {"mean": 1.0, "all_finite": 2.0}  # ranks compare these codes, to notice that they are in different calls


class CollectiveValues:
    """One rank's part of the computations. The first call creates the process group, on the CPU."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._group: Any = None

    def mean(self, value: float | torch.Tensor, weight: float) -> float:
        """Return the mean over all ranks, each with its `weight`; NaN if all weights are 0."""
        number = value.detach().double().mean().item() if isinstance(value, torch.Tensor) else float(value)
        total, weights = self._sum("mean", number * weight, weight)
        return total / weights if weights else float("nan")

    def all_finite(self, value: float | torch.Tensor) -> bool:
        """Return whether all numbers of all ranks are finite: the same result on all ranks."""
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        (bad, _) = self._sum("all_finite", float(not bool(torch.isfinite(tensor).all())), 0.0)
        return not bad

    def _sum(self, name: str, first: float, second: float) -> tuple[float, float]:
        """Return the sums of both numbers over all ranks. Raises RuntimeError if ranks are in different calls."""
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
