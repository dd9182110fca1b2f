"""A trial whose run the killed driver of an earlier part still seems to hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.errors import RunLocked
from ddptrain.sweep.trial import _when_unlocked


class Waiter:
    """A trial that counts its pauses, and is asked to end after `stop_after` of them."""

    def __init__(self, stop_after: int = 1000) -> None:
        self.record, self.status = SimpleNamespace(number=0), ""
        self.stopped: list[Any] = []
        self.pauses, self._stop_after = 0, stop_after

    def wait(self, seconds: float) -> None:
        self.pauses += 1
        if self.pauses >= self._stop_after:
            self.stopped.append(15)


def locked_times(count: int) -> Any:
    left = iter(range(count))

    def work() -> int:
        if next(left, None) is not None:
            raise RunLocked("run s-0001 is held by process 12 on there")
        return 7

    return work


def test_it_waits_until_the_lock_has_expired() -> None:
    trial: Any = Waiter()
    assert _when_unlocked(trial, locked_times(3)) == 7
    assert trial.pauses == 3 and "expire" in trial.status


def test_it_gives_up_when_it_is_asked_to_end_or_out_of_patience() -> None:
    trial: Any = Waiter(stop_after=2)
    with pytest.raises(RunLocked):
        _when_unlocked(trial, locked_times(9))
    assert trial.pauses == 2
    with pytest.raises(RunLocked):
        _when_unlocked(trial, locked_times(9), patience_s=0.0)
    assert trial.pauses == 2
