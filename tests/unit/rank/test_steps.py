"""The first step is reported as a timed activity, and so are waits for data, which are added up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, dataloader

from ddptrain.protocol import events
from ddptrain.rank.output import Emitter
from ddptrain.rank.steps import WaitingTime, measure_data, report_first_step


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.zeros(1)


class Measured:
    """A WaitingTime, and the activities and seconds that it has reported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("ab", buffering=0)
        self.emitter = Emitter(self.file.fileno())
        self.waiting = WaitingTime(self.emitter)

    @property
    def found(self) -> list[tuple[str, float]]:
        timed = [events.decode(line) for line in self.path.read_bytes().splitlines()]
        return [(event.activity, event.seconds) for event in timed if isinstance(event, events.Timed)]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Measured]:
    base: Any = dataloader._BaseDataLoaderIter
    monkeypatch.setattr(base, "__next__", base.__next__)  # measure_data replaces it
    made = Measured(tmp_path / "events")
    yield made
    made.file.close()


def test_waits_are_reported_together_and_short_ones_never(measured: Measured) -> None:
    measured.waiting.add(0.5)
    measured.waiting.add(0.5)
    assert measured.found == []
    measured.waiting.flush()
    assert measured.found == [("data", 1.0)]
    measured.waiting.add(0.001)
    measured.waiting.flush()
    assert len(measured.found) == 1


def test_wait_for_batches_of_any_loader_is_measured(measured: Measured) -> None:
    measure_data(measured.waiting)
    assert sum(1 for _ in DataLoader(Slow(), batch_size=2)) == 2
    measured.waiting.flush()
    ((name, seconds),) = measured.found
    assert name == "data" and seconds >= 4 * 0.02


def test_batches_of_other_threads_are_not_counted(measured: Measured) -> None:
    measure_data(measured.waiting)
    batches: list[Any] = []
    thread = threading.Thread(target=lambda: batches.extend(DataLoader(Slow(), batch_size=2)))
    thread.start()
    thread.join()
    measured.waiting.flush()
    assert len(batches) == 2 and measured.found == []


def test_first_step_of_an_optimizer_is_reported_once(measured: Measured) -> None:
    report_first_step(measured.emitter)
    register_optimizer_step_post_hook(lambda *_: None)  # one more, as that of warn_without_exchange
    time.sleep(0.02)
    optimizer = torch.optim.SGD([torch.ones(1)])
    for _ in range(2):
        optimizer.step()
    assert [name for name, _ in measured.found] == ["first step"]
