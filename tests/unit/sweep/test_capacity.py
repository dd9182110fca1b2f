"""How many trials may run at the same time on a cluster that is shared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.sweep import sweep
from ddptrain.sweep.sweep import Capacity


def cluster(*workers: tuple[int, int], waiting: int = 0) -> Any:
    """A client of a cluster whose workers have (slots, held) each."""
    seen = {"workers": [{"slots": slots, "held": held} for slots, held in workers], "waiting": ["run"] * waiting}
    return SimpleNamespace(run_on_scheduler=lambda function: seen)


def test_slots_of_running_trials_count_besides_free_ones() -> None:
    assert Capacity(None, 2, cluster((4, 4), (4, 1))).trials(running=2) == 3
    assert Capacity(None, 2, cluster((4, 4))).trials(running=0) == 1  # it waits for its slots


def test_free_slots_make_room_for_whole_trials() -> None:
    clusters = [cluster((2 + free, 2)) for free in (0, 1, 2, 5)]
    assert [Capacity(None, 2, each).trials(running=1) for each in clusters] == [1, 1, 2, 3]


def test_a_fixed_number_is_the_most_and_no_trial_starts_without_slots() -> None:
    assert Capacity(3, 1, cluster((8, 0))).trials(running=0) == 3
    assert Capacity(3, 1, cluster((2, 2))).trials(running=2) == 2


def test_no_trial_is_added_while_another_run_waits() -> None:
    assert Capacity(None, 1, cluster((8, 2), waiting=1)).trials(running=2) == 1


def test_it_follows_the_size_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_LOOK_EVERY_S", 0.0)
    client = cluster((2, 2))
    found = Capacity(None, 1, client)
    assert found.trials(running=2) == 2
    client.run_on_scheduler = cluster((2, 2), (2, 0)).run_on_scheduler
    assert found.trials(running=2) == 4


def test_the_embedded_cluster_is_made_for_the_number_of_trials() -> None:
    assert Capacity(2, 2, None).trials(running=0) == 2
