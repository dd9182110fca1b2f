"""Which images each rank takes in each step of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddptrain.workloads.sharding import deal_epoch


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of one step: places in the list that was dealt out (int64, perhaps none), of `total` of all."""

    index: Tensor
    total: int


def plan_epoch(
    n: int,
    batch_size: int,
    world_size: int,
    rank: int,
    seed: int,
    epoch: int,
    taken: Sequence[Sequence[int]] = (),
) -> list[Share]:
    """The steps of one rank in one epoch of `n` images; every rank gets as many, and together they take each once.

    `taken` are (number of ranks, steps) pairs of those that began the epoch; see `dealing.deal_epoch`.
    """
    batches = deal_epoch(n, batch_size, world_size, seed, epoch, taken)
    return [Share(batch[rank::world_size], len(batch)) for batch in batches]


def plan_validation(n: int, batch_size: int, world_size: int, rank: int) -> list[Share]:
    """The same for images in order, each once."""
    if n == 0:
        return []
    batches = torch.tensor_split(torch.arange(n), -(-n // (batch_size * world_size)))
    return [Share(batch[rank::world_size], len(batch)) for batch in batches]
