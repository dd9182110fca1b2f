"""Waits are added up and reported as timed activities."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, dataloader

from ddptrain.protocol import events
from ddptrain.rank.output import Emitter
from ddptrain.rank.steps import WaitingTime, measure_data
from tests.support import fake_time


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
    waiting.add(0.5)
    waiting.add(0.5)
    assert emitted.found == []
    waiting.flush()
    assert emitted.found == [("data", 1.0)]
    waiting.add(0.001)
    waiting.flush()
    assert len(emitted.found) == 1


@pytest.mark.usefixtures("restored_loader")
def test_wait_for_batches_of_any_loader_is_measured(waiting: WaitingTime, emitted: Emitted) -> None:
    measure_data(waiting)
    assert sum(1 for _ in DataLoader(Slow(), batch_size=2)) == 2
    waiting.flush()
    ((name, seconds),) = emitted.found
    assert name == "data"
    assert seconds >= 4 * 0.02


def test_reports_are_ten_seconds_apart_and_count_a_hundredth_of_a_second(
    emitted: Emitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    fake_time.replace(monkeypatch, "monotonic", lambda: now[0])
    waiting = WaitingTime(cast("Emitter", emitted))
    now[0] = 109.0
    waiting.add(0.5)
    assert emitted.found == []
    now[0] = 110.0
    waiting.add(0.5)
    assert emitted.found == [("data", 1.0)]
    now[0] = 119.0
    waiting.add(0.01)
    assert len(emitted.found) == 1
    now[0] = 120.0
    waiting.add(0.0)
    assert emitted.found[1:] == [("data", 0.01)]
    waiting.first_step()
    assert emitted.found[2:] == [("first step", 20.0)], "since the rank has begun"


def test_full_disk_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def emit(self, event: events.Event) -> None:
            raise OSError(28, "No space left on device")

    waiting = WaitingTime(cast("Emitter", Full()))
    waiting.add(1.0)
    waiting.flush()


@pytest.mark.usefixtures("restored_loader")
def test_batches_of_other_threads_are_not_counted(waiting: WaitingTime, emitted: Emitted) -> None:
    measure_data(waiting)
    batches: list[Any] = []
    thread = threading.Thread(target=lambda: batches.extend(DataLoader(Slow(), batch_size=2)))
    thread.start()
    thread.join()
    waiting.flush()
    assert len(batches) == 2 and emitted.found == []


def test_loaders_of_another_version_of_torch_are_left_alone(
    waiting: WaitingTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(dataloader, "_BaseDataLoaderIter")
    measure_data(waiting)
