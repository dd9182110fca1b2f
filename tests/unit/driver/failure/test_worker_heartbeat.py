"""Which ranks are given up because nothing is heard of them, and when."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ddptrain.driver.failure.fault import FaultKind, Loss
from ddptrain.driver.failure.watchdog import Activity
from ddptrain.driver.failure.worker_heartbeat import WorkerHeartbeat
from tests.unit.driver.attempt.ranks import running

START_S = 20.0


def heartbeat(lost_after_s: float = 60.0, checked_at: float = 199.5) -> WorkerHeartbeat:
    return WorkerHeartbeat(START_S, lost_after_s, connected_at=checked_at, checked_at=checked_at)


@dataclass(frozen=True)
class Case:
    """Two ranks on two hosts that were last heard of at these times; `lost` are those given up at 200."""

    heard_at: tuple[float, float]
    lost_after_s: float
    lost: tuple[int, ...]
    words: str = ""


CASES = [
    Case((199.0, 199.0), 60.0, ()),
    Case((199.0, 160.0), 60.0, ()),  # a cut that is shorter
    Case((170.0, 170.0), 60.0, ()),
    Case((199.0, 139.0), 60.0, (1,), "no message came from host h1 for 60 s"),
    Case((139.0, 139.0), 60.0, (0, 1), "no message came from the cluster for 60 s"),
    Case((199.0, 187.0), 12.0, (1,), "no message came from host h1 for 12 s"),
    Case((199.0, 150.0), 300.0, ()),
]


@pytest.mark.parametrize("case", CASES)
def test_worker_that_says_nothing_is_given_up_after_lost_after_s(case: Case) -> None:
    ranks = [running(rank, f"h{rank}") for rank in (0, 1)]
    heard = [Activity(notice_at=at) for at in case.heard_at]
    lost = list(heartbeat(case.lost_after_s).lost_ranks(ranks, heard, 200.0))
    assert tuple(rank.spec.rank for rank, _ in lost) == case.lost
    assert all(loss.kind is FaultKind.WORKER_LOST and loss.text.startswith(case.words) for _, loss in lost)


def test_host_on_which_all_ranks_run_is_named() -> None:
    ranks = [running(rank, "h0") for rank in (0, 1)]
    lost = list(heartbeat().lost_ranks(ranks, [Activity(notice_at=139.0)] * 2, 200.0))
    text = "no message came from host h0 for 60 s: is it down, or the network to it?"
    assert [loss for _, loss in lost] == [Loss(FaultKind.WORKER_LOST, text)] * 2


@pytest.mark.parametrize(("now", "slept_s"), [(391.0, 200.0), (194.1, 3.1), (194.0, 0.0), (191.2, 0.0)])
def test_time_in_which_the_driver_slept_is_measured(now: float, slept_s: float) -> None:
    looked, slept = heartbeat(checked_at=191.0).checked(now, connected=True)
    assert slept == pytest.approx(slept_s)
    assert (looked.checked_at, looked.connected_at) == (now, now)


def test_rank_that_its_worker_does_not_begin_with_is_given_up_after_start_timeout_s() -> None:
    ranks = [running(0, "h0", submitted_at=179.0), running(1, "h1", submitted_at=181.0), running(2, "h2", lost=True)]
    (found,) = heartbeat().lost_ranks(ranks, [Activity()] * 3, 200.0)
    assert found[0].spec.rank == 0
    text = (
        "the Dask worker tcp://h0 of host h0 has not started it within 20 s (cluster.start_timeout_s): is this too "
        "short, or is the worker busy with other tasks?"
    )
    assert found[1] == Loss(FaultKind.INFRASTRUCTURE, text)


def test_rank_that_was_not_submitted_is_not_missed() -> None:
    assert list(heartbeat().lost_ranks([running(0, submitted_at=0.0)], [Activity()], 1e6)) == []


@pytest.mark.parametrize(
    ("connected", "fault", "now", "lost"),
    [
        (True, None, 210.0, None),
        (False, None, 202.5, None),  # 3 s are not over
        (False, None, 202.6, "the Dask scheduler has ended"),
        (False, "the worker ended: exit code 1", 199.6, "the worker ended: exit code 1"),
        (True, "the worker ended: exit code 1", 199.6, "the worker ended: exit code 1"),
    ],
)
def test_cluster_is_lost_with_its_scheduler_or_the_drivers_own_worker(
    connected: bool, fault: str | None, now: float, lost: str | None
) -> None:
    looked, _ = heartbeat().checked(now, connected=connected)
    assert looked.lost_cluster(now, fault) == (Loss(FaultKind.WORKER_LOST, lost) if lost else None)
