"""Names as rows of small integers, and which rows each rank takes in each step of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddptrain.workloads.petnames.alphabet import BLANK, BLANK_ID, STOP, encode
from ddptrain.workloads.sharding import deal_epoch

POOL_STEPS = 16  # whole names are sorted by length within this many steps: little padding, and still well mixed


@dataclass(frozen=True, slots=True)
class Rows:
    """What a model learns from, held as a whole on the device of the rank.

    symbols: uint8, [rows, width]; a row's inputs are all but its last column.
    lengths: int64 on the CPU, [rows]; how many inputs of a row a model has to read, blanks left out.
    n_targets: int64 on the CPU, [rows]; how many of a row's symbols are to be predicted.
    context: "window" (a row is a context and the one symbol after it) or "full" (a row is a whole name).
    """

    symbols: Tensor
    lengths: Tensor
    n_targets: Tensor
    context: str

    def __len__(self) -> int:
        return len(self.symbols)

    def parts(self, index: Tensor, most_rows: int) -> Sequence[Tensor]:
        """`index`, sorted by length, cut into parts of at most `most_rows` rows, of one length where there are many."""
        sizes: list[int] = []
        pending = 0
        _, runs = self.lengths[index].unique_consecutive(return_counts=True)
        for run in runs.tolist():
            pending += run
            if pending >= most_rows // 4:  # fewer rows are no faster than the padding that they would save
                sizes += _near_equal(pending, most_rows)
                pending = 0
        parts: Sequence[Tensor] = index.split(sizes + _near_equal(pending, most_rows))
        return parts

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [n, t] and targets, [n, t] for names and [n, 1] for windows; BLANK is no target.

        t is the longest of the rows' lengths: names are cut after it, windows lose the blanks before it.
        """
        rows = self.symbols[index.to(self.symbols.device, non_blocking=True)]
        longest = int(self.lengths[index].max())
        if self.context == "window":
            return rows[:, -1 - longest : -1], rows[:, -1:].long()
        return rows[:, :longest], rows[:, 1 : longest + 1].long()


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of one step: its rows by length (perhaps none), and the targets of all ranks in that step."""

    index: Tensor
    total_targets: int


def make_rows(
    names: Sequence[str], context: str, window: int, device: torch.device, *, skip_blanks: bool = True
) -> Rows:
    """Rows of `names` for a kind of context; there is at least one name. `skip_blanks` matters to windows only."""
    texts = [BLANK + name + STOP for name in names] if context == "full" else _windows(names, window)
    width = max(len(text) for text in texts)
    symbols = torch.tensor([encode(text.ljust(width, BLANK)) for text in texts], dtype=torch.uint8)
    if context == "full":
        lengths = n_targets = (symbols[:, 1:] != BLANK_ID).sum(1)
    else:
        n_targets = torch.ones(len(symbols), dtype=torch.int64)
        lengths = (symbols[:, :-1] != BLANK_ID).sum(1).clamp(min=1) if skip_blanks else n_targets * window
    return Rows(symbols.to(device), lengths, n_targets, context)


def plan_epoch(
    rows: Rows,
    batch_size: int,
    world_size: int,
    rank: int,
    seed: int,
    epoch: int,
    taken: Sequence[Sequence[int]] = (),
) -> list[Share]:
    """The steps of one rank in one epoch; every rank gets as many, and together they take every row once.

    The rows of a step are of similar length (see `dealing.deal_epoch` for the rest, and for `taken`). As a step's
    gradient is to be the mean over the targets of all ranks, each share knows their number.
    """
    pool_steps = POOL_STEPS if rows.context == "full" else 1

    def arrange(batches: Sequence[Tensor], draw: torch.Generator) -> Sequence[Tensor]:
        return _group_by_length(batches, rows.lengths, pool_steps, draw)

    batches = deal_epoch(len(rows), batch_size, world_size, seed, epoch, taken, arrange)
    return [Share(batch[rank::world_size], int(rows.n_targets[batch].sum())) for batch in batches]


def _group_by_length(
    batches: Sequence[Tensor], lengths: Tensor, pool_steps: int, draw: torch.Generator
) -> Sequence[Tensor]:
    """As many batches of the same sizes, in random order; the rows of each sorted by length.

    Rows move between `pool_steps` batches, so that those of a batch are of similar length.
    """
    grouped: list[Tensor] = []
    for start in range(0, len(batches), pool_steps):
        sizes = [len(batch) for batch in batches[start : start + pool_steps]]
        pool = torch.cat(list(batches[start : start + pool_steps]))
        grouped += pool[lengths[pool].argsort(stable=True)].split(sizes)
    return [grouped[i] for i in torch.randperm(len(grouped), generator=draw).tolist()]


def _near_equal(total: int, most: int) -> list[int]:
    """The fewest near-equal whole numbers that add up to `total`, none above `most`."""
    n_parts = -(-total // most)
    return [(total + i) // n_parts for i in range(n_parts)]


def _windows(names: Sequence[str], window: int) -> list[str]:
    """For each character and the stop of each name: the `window` symbols before it, then itself."""
    padded = [BLANK * window + name + STOP for name in names]
    return [text[end - window : end + 1] for text in padded for end in range(window, len(text))]
