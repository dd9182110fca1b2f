"""Waits are added up and reported as timed activities."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, dataloader

from ddptrain.protocol import events
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.steps import waiting_time
from ddptrain.rank.steps.waiting_time import WaitingTime, measure_data


class Emitted:
    """Keeps what is emitted: activities and seconds."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float]] = []

    def emit(self, event: events.Event) -> None:
        assert isinstance(event, events.Timed)
        self.found.append((event.activity, event.seconds))


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.zeros(1)


@pytest.fixture
def emitted() -> Emitted:
    return Emitted()


@pytest.fixture
def waiting(emitted: Emitted) -> WaitingTime:
    return WaitingTime(cast("Emitter", emitted))


@pytest.fixture
def restored_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    base: Any = dataloader._BaseDataLoaderIter
    monkeypatch.setattr(base, "__next__", base.__next__)


def test_waits_are_reported_together_and_short_ones_never(waiting: WaitingTime, emitted: Emitted) -> None:
    waiting.add("data", 0.5)
    waiting.add("ranks", 0.25)
    waiting.add("data", 0.5)
    assert emitted.found == []
    waiting.flush()
    assert emitted.found == [("data", 1.0), ("ranks", 0.25)]
    waiting.add("data", 0.001)
    waiting.flush()
    assert len(emitted.found) == 2


def test_waits_are_reported_now_and_then(
    waiting: WaitingTime, emitted: Emitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_time, "_EVERY_S", 0.0)
    waiting.add("data", 0.5)
    assert emitted.found == [("data", 0.5)]


@pytest.mark.usefixtures("restored_loader")
def test_wait_for_batches_of_any_loader_is_measured(waiting: WaitingTime, emitted: Emitted) -> None:
    measure_data(waiting)
    assert sum(1 for _ in DataLoader(Slow(), batch_size=2)) == 2
    waiting.flush()
    ((name, seconds),) = emitted.found
    assert name == "data"
    assert seconds >= 4 * 0.02
