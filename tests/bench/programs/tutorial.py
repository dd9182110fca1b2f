"""The tutorial's way to train on pet names, under torchrun.

A dataset that hands out one window at a time, one-hot and encoded beforehand, through DataLoader and
DistributedSampler; an LSTM with 4 layers, dropout 0.1; cross entropy and Adam.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CHARACTERS = "*+abcdefghijklmnopqrstuvwxyz-. "
WINDOW = 8


class TutorialModel(nn.Module):
    """Scores the symbol after each window, [n, 31]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(len(CHARACTERS), 128, num_layers=4, batch_first=True, dropout=0.1)
        self.linear = nn.Linear(128, len(CHARACTERS))

    def forward(self, windows: Tensor) -> Tensor:
        """Takes one-hot windows, [n, 8, 31]."""
        hidden, _ = self.lstm(windows)
        scores: Tensor = self.linear(hidden[:, -1])
        return scores


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """For each character and the stop of each name: the 8 symbols before it, one-hot, and itself."""

    def __init__(self, names: Sequence[str]) -> None:
        padded = ["*" * WINDOW + name + "+" for name in names]
        texts = [text[end - WINDOW : end + 1] for text in padded for end in range(WINDOW, len(text))]
        symbols = torch.tensor([[CHARACTERS.index(symbol) for symbol in text] for text in texts])
        self.windows = functional.one_hot(symbols[:, :-1], len(CHARACTERS)).float()
        self.targets = symbols[:, -1]
        self.order = torch.randperm(len(texts))

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        place = self.order[index]
        return self.windows[place], self.targets[place]


def train(names: str, batch_size: int, epochs: int, out: str) -> None:
    """Trains; writes how many samples a rank had an epoch, and when each epoch ended, to `out`.<rank>."""
    dataset = Windows(json.loads(Path(names).read_text()))
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    model = DistributedDataParallel(TutorialModel())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    ends_s: list[float] = []
    for epoch in range(1, epochs + 1):
        sampler.set_epoch(epoch)
        for windows, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(windows), targets)
            loss.backward()
            optimizer.step()
        ends_s.append(time.time())
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    record = {"samples_per_epoch": len(sampler), "ends_s": ends_s}
    Path(f"{out}.{dist.get_rank()}").write_text(json.dumps(record))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(**json.loads(sys.argv[1]))
    dist.destroy_process_group()
