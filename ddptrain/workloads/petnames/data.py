"""Names as rows of small integers, and the rows that each rank takes in each step of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddptrain.workloads.data_shards import RankShare, deal_epoch
from ddptrain.workloads.petnames.alphabet import BLANK, BLANK_ID, STOP, encode

POOL_STEPS = 16  # whole names are sorted by length within so many steps: little padding, and the order stays random


@dataclass(frozen=True, slots=True)
class Rows:
    """The training data, as a whole on the device of the rank.

    symbols: uint8 [rows, width]. The inputs of a row are all columns except the last.
    lengths: int64 [rows], on the CPU. The number of inputs of a row: of a name without its padding.
    n_targets: int64 [rows], on the CPU. The number of symbols to predict in a row.
    context: "window" (a row is a context and the symbol after it) or "full" (a row is a whole name).
    """

    symbols: Tensor
    lengths: Tensor
    n_targets: Tensor
    context: str

    def __len__(self) -> int:
        return len(self.symbols)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [n, t] and targets: [n, t] for names, [n, 1] for windows. BLANK is never a target.

        t is the largest length of the rows.
        """
        rows = self.symbols[index.to(self.symbols.device, non_blocking=True)]
        if self.context == "window":
            return rows[:, :-1], rows[:, -1:].long()
        longest = int(self.lengths[index].max())
        return rows[:, :longest], rows[:, 1 : longest + 1].long()


def make_rows(names: Sequence[str], context: str, window: int, device: torch.device) -> Rows:
    """Encode names; at least one is needed."""
    texts = [BLANK + name + STOP for name in names] if context == "full" else _windows(names, window)
    width = max(len(text) for text in texts)
    symbols = torch.tensor([encode(text.ljust(width, BLANK)) for text in texts], dtype=torch.uint8)
    if context == "full":
        lengths = n_targets = (symbols[:, 1:] != BLANK_ID).sum(1)
    else:
        n_targets = torch.ones(len(symbols), dtype=torch.int64)
        lengths = n_targets * window
    return Rows(symbols.to(device), lengths, n_targets, context)


def plan_epoch(
    rows: Rows, batch_size: int, world_size: int, rank: int, seed: int, epoch: int, taken: Sequence[Sequence[int]] = ()
) -> list[RankShare]:
    """Return the steps of one rank in one epoch. All ranks get equally many, and together they take each row once.

    The rows of a step have similar lengths. The total of a share is the number of targets of all ranks in the step,
    because the gradient of a step is the mean over them. For `taken` see data_shards.deal_epoch.
    """
    pool_steps = POOL_STEPS if rows.context == "full" else 1

    def arrange(batches: Sequence[Tensor], draw: torch.Generator) -> Sequence[Tensor]:
        return _group_by_length(batches, rows.lengths, pool_steps, draw)

    batches = deal_epoch(len(rows), batch_size, world_size, seed, epoch, taken, arrange)
    return [RankShare(batch[rank::world_size], int(rows.n_targets[batch].sum())) for batch in batches]


def _group_by_length(
    batches: Sequence[Tensor], lengths: Tensor, pool_steps: int, draw: torch.Generator
) -> Sequence[Tensor]:
    """Move rows between batches so that the rows of a batch have similar lengths; each batch is sorted by length.

    Number and sizes of the batches stay the same; their order becomes random. Rows move only within groups of
    `pool_steps` batches.
    """
    grouped: list[Tensor] = []
    for start in range(0, len(batches), pool_steps):
        sizes = [len(batch) for batch in batches[start : start + pool_steps]]
        pool = torch.cat(list(batches[start : start + pool_steps]))
        grouped += pool[lengths[pool].argsort(stable=True)].split(sizes)
    return [grouped[i] for i in torch.randperm(len(grouped), generator=draw).tolist()]


def _windows(names: Sequence[str], window: int) -> list[str]:
    """One text for each character, and for the stop, of each name: the `window` symbols before it, then the symbol."""
    padded = [BLANK * window + name + STOP for name in names]
    return [text[end - window : end + 1] for text in padded for end in range(window, len(text))]
