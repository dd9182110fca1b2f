"""What an event changes of a rank, its record in run.json, and what the ends of all ranks say about an attempt."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ddptrain.driver.failure.fault import Fault, FaultKind
from ddptrain.driver.ranks import AttemptEnd
from ddptrain.protocol import events
from ddptrain.protocol.worker_notices import RankExit
from ddptrain.results.run_record import RankRecord
from tests.unit.driver.attempt.ranks import running

STARTED = events.Started(1, 42, "its host", "cuda:1")
EXIT = RankExit(1, 3, 43, -9, 5, 0, 0)
STRICT = events.TrackerFailed(7, "wandb", "is off", strict=True)


@pytest.mark.parametrize(
    ("event", "changes"),
    [
        (events.Metrics(1, {"loss": 1.0}, 7), {"step": 7}),
        (events.Metrics(1, {"loss": 1.0}, None), {}),
        (STARTED, {"started": STARTED}),
        (events.Entered(1), {"entered": True}),
        (events.Finished(1), {"finished": True}),
        (events.Preempted(1, 5), {"preempted": True}),
        (STRICT, {"tracker_fault": Fault(3, FaultKind.TRACKER, 7, "tracker wandb is off")}),
        (events.TrackerFailed(7, "wandb", "is off", strict=False), {}),
        (events.Progress(1, 5), {}),
    ],
)
def test_event_changes_what_is_known_of_its_rank(event: events.Event, changes: dict[str, Any]) -> None:
    rank = running(3)
    rank.on_event(event)
    assert rank == dataclasses.replace(running(3), **changes)


def test_first_tracker_that_failed_is_kept() -> None:
    rank = running(3)
    rank.on_event(STRICT)
    rank.on_event(events.TrackerFailed(8, "tensorboard", "no", strict=True))
    assert rank.tracker_fault is not None and rank.tracker_fault.time_ns == 7


@pytest.mark.parametrize(
    ("state", "over", "well"),
    [
        ({}, False, False),
        ({"ended": EXIT}, True, False),
        ({"lost": True}, True, False),
        ({"finished": True}, False, True),
        ({"preempted": True}, False, True),
    ],
)
def test_rank_is_over_once_it_has_ended_or_is_lost_and_well_if_it_has_done_its_work(
    state: dict[str, Any], over: bool, well: bool
) -> None:
    rank = running(3, **state)
    assert (rank.over, rank.well, rank.worker) == (over, well, "tcp://h3")


@pytest.mark.parametrize(
    ("state", "host", "pid", "gpu", "status"),
    [
        ({}, "h3", None, None, None),
        ({"ended": EXIT}, "h3", 43, None, -9),
        ({"started": STARTED}, "its host", 42, "cuda:1", None),
        ({"started": STARTED, "ended": EXIT}, "its host", 42, "cuda:1", -9),
        ({"started": events.Started(1, 42, "its host", "cpu")}, "its host", 42, None, None),
    ],
)
def test_record_of_a_rank(
    state: dict[str, Any], host: str, pid: int | None, gpu: str | None, status: int | None
) -> None:
    rank = running(3, spec={"local_rank": 1, "node_rank": 2}, **state)
    assert rank.record() == RankRecord(rank=3, local_rank=1, node_rank=2, host=host, pid=pid, gpu=gpu, exit=status)


SAVED = (running(0, preempted=True), running(1, finished=True))


@pytest.mark.parametrize(
    ("ranks", "saved_itself", "finished"),
    [
        (SAVED, True, False),
        ((running(0, preempted=True),), True, False),
        ((running(0, preempted=True), running(1)), False, False),
        ((running(0, finished=True), running(1, finished=True)), False, True),
        ((running(0, finished=True), running(1)), False, False),
        ((running(0),), False, False),
    ],
)
def test_end_of_all_ranks(ranks: Any, saved_itself: bool, finished: bool) -> None:
    end = AttemptEnd(ranks, None, None)
    assert (end.saved_itself, end.finished, end.leaving) == (saved_itself, finished, False)
