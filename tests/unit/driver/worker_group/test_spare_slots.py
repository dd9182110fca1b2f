"""Slots that a slow rank leaves: asked for at the scheduler, avoided until others have taken the spare ones."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.clusters.scheduler import slots
from ddptrain.driver.worker_group import spare_slots
from ddptrain.driver.worker_group.spare_slots import SpareSlots

SLOW = [slots.Slot("tcp://a", "a", 1, True, True), slots.Slot("tcp://b", "b", 0, True, True)]


class Scheduler:
    """A client whose scheduler gives these answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: dict[str, Any] | Exception) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.waits: list[tuple[float, int]] = []
        self.answers = list(answers)
        monkeypatch.setattr(spare_slots, "dask_call", SimpleNamespace(wait_for_answer=self.wait_for_answer))

    def run_on_scheduler(self, *arguments: Any, asynchronous: bool = False) -> tuple[Any, ...]:
        assert asynchronous
        self.asked.append(arguments)
        return arguments

    def wait_for_answer(
        self, client: Any, question: Any, patience_s: Callable[[], float], heard: Callable[[], int]
    ) -> dict[str, Any]:
        assert client is self and question is self.asked[-1]
        self.waits.append((patience_s(), heard()))
        answer: dict[str, Any] | Exception = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_slots_are_avoided_once_there_are_spare_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [{"found": True, "avoid": [["tcp://b", 0], ["tcp://a", 1]]}, {"found": True, "avoid": [["tcp://a", 0]]}]
    scheduler: Any = Scheduler(monkeypatch, *found)
    spares = SpareSlots(scheduler, "r")
    assert spares.avoided == []
    assert spares.find(iter(SLOW)) is True
    assert scheduler.asked == [(slots.find_spare, "r", [("tcp://a", 1), ("tcp://b", 0)])]
    assert scheduler.waits == [(3.0, 0)]
    assert spares.avoided == [("tcp://a", 1), ("tcp://b", 0)]
    assert spares.find(SLOW[:1]) is True
    assert spares.avoided == [("tcp://a", 0), ("tcp://a", 1), ("tcp://b", 0)]


@pytest.mark.parametrize("answer", [{"found": False, "avoid": [["tcp://a", 1]]}, TimeoutError("no answer")])
def test_nothing_is_avoided_without_spare_slots(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    scheduler: Any = Scheduler(monkeypatch, answer)
    spares = SpareSlots(scheduler, "r")
    assert spares.find(SLOW) is False
    assert spares.avoided == [] and spares.give_up() is False


def test_slots_are_avoided_until_they_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler: Any = Scheduler(monkeypatch, {"found": True, "avoid": [["tcp://a", 1]]})
    spares = SpareSlots(scheduler, "r")
    spares.find(SLOW)
    assert spares.give_up() is True
    assert spares.avoided == [] and spares.give_up() is False
