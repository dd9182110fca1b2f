"""Warns if the ranks of a function exchange no gradients: each of them would train a model of its own, unnoticed.

Steps of the optimizer are counted, and the numbers of collective operations of all process groups are read twice. So a
step costs nothing that could be measured, and any exchange counts: that of DDP, FSDP, or the user's own.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddptrain.protocol import events
from ddptrain.rank.collective.reductions import GROUP_NAME
from ddptrain.rank.emitter import Emitter

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
            with suppress(OSError):  # the disk is full; the workload gets an error, too
                emitter.emit(events.Note(time.time_ns(), text, "warning"))

    register_optimizer_step_post_hook(count)


def _begun_operations() -> int:
    """Return how many collective operations this rank has begun, without those of ctx.mean; -1 if not known."""
    try:
        groups: list[Any] = list(c10d._world.pg_map)  # noqa: SLF001  # there is no public function
        return sum(group._get_sequence_number_for_group() for group in groups if group.group_desc != GROUP_NAME)  # noqa: SLF001
    except RuntimeError:  # a backend that does not count
        return -1
