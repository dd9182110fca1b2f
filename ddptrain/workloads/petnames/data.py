"""Names as rows of small integers, and which rows each rank takes in each step of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddptrain.workloads.petnames.alphabet import BLANK, BLANK_ID, STOP, encode

POOL_STEPS = 16  # names are sorted by length within this many steps: little padding, and still well mixed


@dataclass(frozen=True, slots=True)
class Rows:
    """What a model learns from, held as a whole on the device of the rank.

    symbols: uint8, [rows, width]; a row's inputs are all but its last column.
    n_targets: int64 on the CPU, [rows]; how many of a row's symbols are to be predicted.
    context: "window" (a row is a context and the one symbol after it) or "full" (a row is a whole name).
    """

    symbols: Tensor
    n_targets: Tensor
    context: str

    def __len__(self) -> int:
        return len(self.symbols)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [n, t] and targets [n, t] (or [n, 1] for windows), cut to the longest name; BLANK is no target."""
        rows = self.symbols[index.to(self.symbols.device, non_blocking=True)]
        if self.context == "window":
            return rows[:, :-1], rows[:, -1:].long()
        longest = int(self.n_targets[index].max())
        return rows[:, :longest], rows[:, 1 : longest + 1].long()


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of one step: its rows (perhaps none), and the targets of all ranks' rows in that step."""

    index: Tensor
    total_targets: int


def make_rows(names: Sequence[str], context: str, window: int, device: torch.device) -> Rows:
    """Rows of `names` for a kind of context; there is at least one name."""
    texts = [BLANK + name + STOP for name in names] if context == "full" else _windows(names, window)
    width = max(len(text) for text in texts)
    symbols = torch.tensor([encode(text.ljust(width, BLANK)) for text in texts], dtype=torch.uint8)
    n_targets = (symbols[:, 1:] != BLANK_ID).sum(1) if context == "full" else torch.ones(len(texts), dtype=torch.int64)
    return Rows(symbols.to(device), n_targets, context)


def plan_epoch(rows: Rows, batch_size: int, world_size: int, rank: int, seed: int, epoch: int) -> list[Share]:
    """The steps of one rank in one epoch; every rank gets as many, and together they take every row once.

    All ranks draw the same permutation, cut it into the fewest near-equal batches that fit, and deal each batch out
    in turn. So no batch is much smaller than another, shares of a step differ by one row at most, and only where a
    batch has fewer rows than there are ranks some share is empty. As a step's gradient is to be the mean over the
    targets of all ranks, each share knows their number.
    """
    n_steps = -(-len(rows) // (batch_size * world_size))
    draw = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    batches = list(torch.tensor_split(torch.randperm(len(rows), generator=draw), n_steps))
    if rows.context == "full":
        batches = _group_by_length(batches, rows.n_targets, draw)
    return [Share(batch[rank::world_size], int(rows.n_targets[batch].sum())) for batch in batches]


def _group_by_length(batches: list[Tensor], n_targets: Tensor, draw: torch.Generator) -> list[Tensor]:
    """As many batches of the same sizes, each of names of similar length, in random order."""
    grouped: list[Tensor] = []
    for start in range(0, len(batches), POOL_STEPS):
        pool = torch.cat(batches[start : start + POOL_STEPS])
        by_length = pool[n_targets[pool].argsort(stable=True)]
        grouped += by_length.split([len(batch) for batch in batches[start : start + POOL_STEPS]])
    return [grouped[i] for i in torch.randperm(len(grouped), generator=draw).tolist()]


def _windows(names: Sequence[str], window: int) -> list[str]:
    """For each character and the stop of each name: the `window` symbols before it, then itself."""
    padded = [BLANK * window + name + STOP for name in names]
    return [text[end - window : end + 1] for text in padded for end in range(window, len(text))]
