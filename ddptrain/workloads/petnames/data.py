"""Names as rows of small integers: whole names, or a window for each character."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import Dataset

from ddptrain.workloads.petnames.names import BLANK, STOP, encode


class NameDataset(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """The rows of a list of names.

    With context "full" a row is a name, and the targets are its characters and the stop. With "window" a row is the
    `window` symbols before a character or stop of a name, which is its only target.
    """

    def __init__(self, names: Sequence[str], context: str, window: int) -> None:
        self._is_full = context == "full"
        if self._is_full:
            texts = [BLANK + name + STOP for name in names]
        else:
            padded = [BLANK * window + name + STOP for name in names]
            texts = [text[end - window : end + 1] for text in padded for end in range(window, len(text))]
        width = max(map(len, texts))
        self.symbols = torch.tensor([encode(text.ljust(width, BLANK)) for text in texts], dtype=torch.uint8)
        self.lengths = torch.tensor([len(text) - 1 for text in texts])  # of the inputs of each row

    def __len__(self) -> int:
        return len(self.symbols)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return symbols [n, t] and lengths [n] of n rows, the longest first, and all their targets [m].

        The targets are in the order of the model's scores.
        """
        index = index[self.lengths[index].argsort(descending=True, stable=True)]
        rows, lengths = self.symbols[index], self.lengths[index]
        longest = int(lengths[0])
        if not self._is_full:
            return rows[:, :-1], lengths, rows[:, -1].long()
        targets = pack_padded_sequence(rows[:, 1 : longest + 1].long(), lengths, batch_first=True).data
        return rows[:, :longest], lengths, targets

    def __getitems__(self, index: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return a whole batch at once, as a DataLoader asks for it."""
        return self.batch(torch.tensor(index))
