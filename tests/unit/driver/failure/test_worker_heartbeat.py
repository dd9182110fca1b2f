"""Who is given up when nothing is heard any more, and when."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from ddptrain.clusters.scheduler.slots import Slot
from ddptrain.driver.failure.fault import Kind
from ddptrain.driver.failure.worker_heartbeat import Presence
from ddptrain.driver.rank_state import RankWatch
from ddptrain.driver.worker_group import Place
from tests.unit.specs import make_spec

START_S = 20.0


def watch(rank: int, host: str, heard_at: float) -> RankWatch:
    place = Place(rank, 0, 1, rank, Slot(f"tcp://{host}", host, 0, False), host, Path("/s"), True)
    return RankWatch(make_spec(rank=rank), place, cast("Any", None), submitted_at=100.0, heard_at=heard_at)


@dataclass(frozen=True)
class Case:
    """Two ranks on two hosts that were last heard at these times; `lost` are those given up at 200."""

    heard_at: tuple[float, float]
    lost_after_s: float
    lost: tuple[int, ...]
    words: str = ""


CASES = [
    Case((199.0, 199.0), 60.0, ()),
    Case((199.0, 160.0), 60.0, ()),  # a cut that is shorter
    Case((170.0, 170.0), 60.0, ()),
    Case((199.0, 139.0), 60.0, (1,), "nothing was heard from host h1 for 60 s"),
    Case((139.0, 139.0), 60.0, (0, 1), "nothing was heard from the cluster for 60 s"),
    Case((199.0, 187.0), 12.0, (1,), "nothing was heard from host h1 for 12 s"),
    Case((199.0, 150.0), 300.0, ()),
]


@pytest.mark.parametrize("case", CASES)
def test_worker_that_says_nothing_is_given_up_after_lost_after_s(case: Case) -> None:
    ranks = [watch(rank, f"h{rank}", at) for rank, at in enumerate(case.heard_at)]
    presence = Presence(ranks, lambda: None, lambda: True, START_S, case.lost_after_s, lambda _: None)
    presence.looked_at = 199.5
    lost = list(presence.losses(200.0, all_read=True))
    assert tuple(loss.watch.spec.rank for loss in lost) == case.lost
    assert all(loss.kind is Kind.WORKER_LOST and loss.text.startswith(case.words) for loss in lost)


def test_time_in_which_the_driver_slept_does_not_count() -> None:
    slept: list[float] = []
    ranks = [watch(0, "h0", 190.0)]
    presence = Presence(ranks, lambda: None, lambda: True, START_S, 60.0, slept.append)
    presence.looked_at = 191.0
    assert list(presence.losses(391.0, all_read=True)) == [] and slept == [200.0]


def test_messages_that_wait_are_read_before_anybody_is_given_up() -> None:
    presence = Presence([watch(0, "h0", 100.0)], lambda: None, lambda: True, START_S, 60.0, lambda _: None)
    presence.looked_at = 199.5
    assert list(presence.losses(200.0, all_read=False)) == []
