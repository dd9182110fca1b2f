"""Epochs dealt out to ranks: every row once by all of them together, also where others have begun the epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

Batches = Sequence[Tensor]


def deal_epoch(
    n_rows: int,
    batch_size: int,
    world_size: int,
    seed: int,
    epoch: int,
    taken: Sequence[Sequence[int]] = (),
    arrange: Callable[[Batches, torch.Generator], Batches] | None = None,
) -> Batches:
    """The steps of an epoch: for each the rows (int64) of all ranks, which take them in turn.

    All ranks draw the same permutation and cut it into the fewest near-equal batches that fit. So no batch is much
    smaller than another, shares of a step differ by one row at most, and only where a batch has fewer rows than
    there are ranks some share is empty. `arrange` may move rows between the batches that it is given, and draw.

    `taken` are (number of ranks, steps) pairs of those that began the epoch: the rows of these steps are left out, and
    the others dealt out again.
    """
    draw = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    left = torch.arange(n_rows)

    def deal(ranks: int) -> Batches:
        if len(left) == 0:
            return []
        shuffled = left[torch.randperm(len(left), generator=draw)]
        batches = torch.tensor_split(shuffled, -(-len(left) // (batch_size * ranks)))
        return arrange(batches, draw) if arrange else batches

    for ranks, steps in taken:
        left = torch.cat([left[:0], *deal(ranks)[steps:]])
    return deal(world_size)


@dataclass(slots=True)
class Part:
    """Where in an epoch the ranks are: `steps` of their own, after others who have `taken` and did the share `begun`.

    taken: (number of ranks, steps) pairs, as deal_epoch wants them.
    """

    taken: list[list[int]] = field(default_factory=list)
    begun: float = 0.0
    steps: int = 0
    is_resumed: bool = False

    @classmethod
    def after(cls, taken: list[list[int]], begun: float, done: float, world_size: int) -> Self:
        """The part that follows where the share `done` is done; the last pair of `taken` began at the share `begun`."""
        if not taken:
            return cls()
        if taken[-1][0] == world_size:
            return cls(taken[:-1], begun, taken[-1][1], is_resumed=True)  # the same plan goes on
        return cls(taken, done, is_resumed=True)

    def done(self, n_steps: int) -> float:
        """The share of the epoch that is done, where this part has `n_steps`."""
        return self.begun + (1 - self.begun) * self.steps / n_steps

    def state(self, world_size: int) -> dict[str, object]:
        """What a checkpoint holds of it, and `after` takes: `taken` and `begun`."""
        return {"taken": [*self.taken, [world_size, self.steps]] if self.steps else self.taken, "begun": self.begun}
