"""Divides the rows of an epoch among ranks; also the rest of an epoch that another number of ranks began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

Batches = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's part of one step: row numbers (int64, perhaps none), and the total of all ranks in the step."""

    index: Tensor
    total: int


def plan_epoch(
    n: int, batch_size: int, world_size: int, rank: int, seed: int, epoch: int, taken: Sequence[Sequence[int]] = ()
) -> list[RankShare]:
    """The steps of one rank in one epoch of `n` rows. All ranks get equally many, and together they take each row once.

    For `taken` see deal_epoch. The total of a share is the number of rows of the step.
    """
    batches = deal_epoch(n, batch_size, world_size, seed, epoch, taken)
    return [RankShare(batch[rank::world_size], len(batch)) for batch in batches]


def plan_validation(n: int, batch_size: int, world_size: int, rank: int) -> list[RankShare]:
    """The steps of one rank in a validation of `n` rows, in their order; none if `n` is 0."""
    if n == 0:
        return []
    batches = torch.tensor_split(torch.arange(n), -(-n // (batch_size * world_size)))
    return [RankShare(batch[rank::world_size], len(batch)) for batch in batches]


def deal_epoch(
    n_rows: int,
    batch_size: int,
    world_size: int,
    seed: int,
    epoch: int,
    taken: Sequence[Sequence[int]] = (),
) -> Batches:
    """Return the steps of an epoch: for each, the rows (int64) of all ranks, which take them in turn.

    All ranks draw the same permutation and cut it into the fewest batches, whose sizes differ by at most 1. So shares
    of a step differ by at most one row, and a share is empty only if a batch has fewer rows than there are ranks.

    taken: (number of ranks, steps) pairs of the ranks that began the epoch. The rows of these steps are left out, and
    the others are dealt again.
    """
    draw = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    left = torch.arange(n_rows)

    def deal(ranks: int) -> Batches:
        if len(left) == 0:
            return []
        shuffled = left[torch.randperm(len(left), generator=draw)]
        return torch.tensor_split(shuffled, -(-len(left) // (batch_size * ranks)))

    for ranks, steps in taken:
        left = torch.cat([left[:0], *deal(ranks)[steps:]])
    return deal(world_size)


@dataclass(slots=True)
class EpochProgress:
    """The position in an epoch: `steps` by the current ranks, after other ranks took `taken`, the share `begun` of it.

    taken: (number of ranks, steps) pairs, as for deal_epoch.
    """

    taken: list[list[int]] = field(default_factory=list)
    begun: float = 0.0
    steps: int = 0
    is_resumed: bool = False

    @classmethod
    def resumed(cls, taken: list[list[int]], begun: float, done: float, world_size: int) -> Self:
        """The position after a resume at the share `done`; the last pair of `taken` began at the share `begun`."""
        if not taken:
            return cls()
        if taken[-1][0] == world_size:
            return cls(taken[:-1], begun, taken[-1][1], is_resumed=True)  # the same plan continues
        return cls(taken, done, is_resumed=True)

    def done(self, n_steps: int) -> float:
        """Return the share of the epoch that is done, if the current ranks have `n_steps` steps."""
        return self.begun + (1 - self.begun) * self.steps / n_steps

    def state(self, world_size: int) -> dict[str, object]:
        """Return the position for a checkpoint: `taken` and `begun`, as `resumed` needs them."""
        return {"taken": [*self.taken, [world_size, self.steps]] if self.steps else self.taken, "begun": self.begun}
