"""The activity of a rank, step by step: what each sign changes, and the limits that follow from it."""

from __future__ import annotations

from typing import Any

import pytest

from ddptrain.driver.failure.watchdog import Activity, Watchdog, alive_s, new_watchdog
from ddptrain.protocol import events
from tests.unit.driver.attempt.ranks import running

FOLLOWS = "hang_timeout_s: auto is 60 s, as its longest pause was 6.0 s"
ALONE = "CPU or GPU use alone counts for"
BEFORE = Activity(spoke_at=10.0, cpu_s=1.0, newest_cpu_s=3.0)


@pytest.mark.parametrize(
    ("before", "changes"),
    [
        (BEFORE, {"spoke_at": 50.0, "cpu_s": 3.0}),  # no pause counts before the first report
        (BEFORE._replace(reported_at=8.0), {"spoke_at": 50.0, "cpu_s": 3.0, "longest_pause_s": 40.0}),
        (BEFORE._replace(reported_at=8.0, longest_pause_s=45.0), {"spoke_at": 50.0, "cpu_s": 3.0}),
    ],
)
def test_event_or_line_is_activity_and_ends_a_pause(before: Activity, changes: dict[str, Any]) -> None:
    assert before.spoke(50.0) == before._replace(**changes)


def test_reports_are_counted_from_the_first() -> None:
    once = Activity().reported(5.0)
    assert (once.reported_at, once.report_count) == (5.0, 1)
    assert (once.reported(9.0).reported_at, once.reported(9.0).report_count) == (5.0, 2)


@pytest.mark.parametrize(("size", "spoke_at"), [(99, 10.0), (100, 10.0), (101, 50.0)])
def test_log_that_grows_is_activity(size: int, spoke_at: float) -> None:
    grown = BEFORE._replace(log_size=100).grew(size, 50.0)
    assert (grown.spoke_at, grown.log_size) == (spoke_at, max(size, 100))


@pytest.mark.parametrize(("percent", "gpu_at"), [(4.9, 2.0), (5.0, 50.0)])
def test_gpu_counts_from_5_percent(percent: float, gpu_at: float) -> None:
    used = Activity(gpu_at=2.0).used_gpu(percent, 50.0)
    assert (used.has_gpu, used.gpu_at) == (True, gpu_at)


@pytest.mark.parametrize(("now", "rested"), [(15.0, 0.0), (15.1, 5.1)])
def test_time_without_a_notice_of_the_worker_does_not_count(now: float, rested: float) -> None:
    before = Activity(spoke_at=3.0, cpu_at=4.0, entered_at=2.0, reported_at=2.5, excused_until=90.0, notice_at=10.0)
    seen = before.noticed(now)
    shifted = {"spoke_at": 3.0, "cpu_at": 4.0, "entered_at": 2.0, "reported_at": 2.5, "excused_until": 90.0}
    changes: dict[str, Any] = {name: at + rested for name, at in shifted.items()}
    expected = before._replace(**changes, notice_at=now)
    assert seen == pytest.approx(expected)
    assert Activity().noticed(50.0) == Activity(notice_at=50.0)


def test_time_is_not_shifted_into_the_future() -> None:
    moved = Activity(spoke_at=49.0, gpu_at=1.0, excused_until=49.0, notice_at=20.0).shifted(5.0, 50.0)
    assert moved == Activity(spoke_at=50.0, gpu_at=6.0, excused_until=54.0, notice_at=25.0)


@pytest.mark.parametrize(
    ("count", "since_s", "pause_s", "adapts", "limit_s"),
    [
        (20, 20.0, 6.0, True, 60.0),  # ten times the longest pause
        (20, 20.0, 3.9, True, 40.0),  # the shortest limit
        (20, 20.0, 61.0, True, 600.0),  # the longest one
        (19, 20.0, 6.0, True, 600.0),
        (20, 19.9, 6.0, True, 600.0),
        (20, 20.0, 6.0, False, 600.0),
    ],
)
def test_limit_follows_the_pauses_once_there_are_enough_reports(
    count: int, since_s: float, pause_s: float, adapts: bool, limit_s: float
) -> None:
    activity = Activity(spoke_at=100.0 + since_s, reported_at=100.0, report_count=count, longest_pause_s=pause_s)
    assert Watchdog(600.0, 120.0, adapts=adapts).limit_s(activity) == limit_s
    assert Watchdog(None, 120.0, adapts=adapts).limit_s(activity) is None


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("auto", Watchdog(600.0, 9.0, adapts=True)), (50.0, Watchdog(50.0, 9.0)), (None, Watchdog(None, 9.0))],
)
def test_watchdog_of_a_setting(setting: Any, expected: Watchdog) -> None:
    assert new_watchdog(setting, 9.0) == expected


@pytest.mark.parametrize(
    ("timeout_s", "start_timeout_s", "start_s"), [(600.0, 120.0, 600.0), (60.0, 120.0, 120.0), (None, 120.0, 120.0)]
)
def test_start_may_take_the_longer_of_two_limits(
    timeout_s: float | None, start_timeout_s: float, start_s: float
) -> None:
    assert Watchdog(timeout_s, start_timeout_s).start_s == start_s


@pytest.mark.parametrize(
    ("hang_timeout_s", "lost_after_s", "expected"),
    [(60.0, 60.0, 2.0), (4.0, 60.0, 1.0), (60.0, 4.0, 1.0), ("auto", 6.0, 1.5), (None, 6.0, 1.5)],
)
def test_workers_send_notices_often_enough_for_both_limits(
    hang_timeout_s: Any, lost_after_s: float, expected: float
) -> None:
    assert alive_s(hang_timeout_s, lost_after_s) == expected


@pytest.mark.parametrize(
    ("before", "seconds", "after"),
    [
        ((1.0, 1.0), 1.59, (1.59, 1.0, 0.0)),  # less than 1 % of 60 s
        ((1.0, 1.0), 1.6, (1.6, 1.6, 50.0)),
        ((5.0, 5.0), 2.0, (2.0, 2.0, 0.0)),  # a child has ended
    ],
)
def test_cpu_time_of_one_percent_of_the_limit_is_activity(
    before: tuple[float, float], seconds: float, after: tuple[float, float, float]
) -> None:
    activity = Activity(cpu_s=before[0], newest_cpu_s=before[1])
    used = Watchdog(60.0, 9.0).after_cpu(activity, seconds, 50.0)
    assert (used.newest_cpu_s, used.cpu_s, used.cpu_at) == after
    unlimited = Watchdog(None, 9.0).after_cpu(activity, 99.0, 50.0)
    assert (unlimited.newest_cpu_s, unlimited.cpu_s, unlimited.cpu_at) == (99.0, before[0], 0.0)


@pytest.mark.parametrize(
    ("event", "changes"),
    [
        (events.Entered(0), {"entered_at": 50.0, "spoke_at": 50.0}),
        (events.Finishing(0, 30.0), {"excused_until": 80.0, "spoke_at": 50.0}),
        (events.Finishing(0, 9e9), {"excused_until": 3650.0, "spoke_at": 50.0}),
        (events.Note(0, "n"), {"spoke_at": 50.0}),
        (events.Progress(0, 1), {"reports": True, "reported_at": 50.0, "report_count": 1, "spoke_at": 50.0}),
        (events.Stacks(0, ()), {}),
    ],
)
def test_event_changes_the_activity(event: events.Event, changes: dict[str, Any]) -> None:
    assert Watchdog(60.0, 9.0).after_event(Activity(), event, 50.0) == Activity(**changes)
    assert Watchdog(None, 9.0).after_event(Activity(), event, 50.0) == Activity()


@pytest.mark.parametrize(("entered_at", "reports"), [(40.0, True), (39.9, False)])
def test_rank_reports_if_its_first_report_is_in_time(entered_at: float, reports: bool) -> None:
    seen = Watchdog(60.0, 9.0).after_event(Activity(entered_at=entered_at), events.Progress(0, 1), 100.0)
    assert seen.reports is reports
    assert Watchdog(60.0, 9.0).after_event(seen, events.Progress(0, 2), 9e9).reports is reports


@pytest.mark.parametrize(
    ("activity", "now", "expected"),
    [
        (Activity(), 130.0, "last event or printed line 30 s ago, last CPU use 30 s ago, GPU use not measured"),
        (
            Activity(spoke_at=110.0, cpu_at=120.0, gpu_at=125.0, has_gpu=True),
            130.0,
            "last event or printed line 20 s ago, last CPU use 10 s ago, last GPU use 5 s ago",
        ),
        (
            Activity(spoke_at=110.0, reported_at=90.0, report_count=20, longest_pause_s=6.0),
            3710.0,
            f"last event or printed line 3600 s ago, last CPU use 3610 s ago, GPU use not measured; {FOLLOWS}",
        ),
        (
            Activity(),
            3701.0,
            f"last event or printed line 3601 s ago, last CPU use 3601 s ago, GPU use not measured; {ALONE} 3600 s",
        ),
    ],
)
def test_what_was_checked_is_told(activity: Activity, now: float, expected: str) -> None:
    assert Watchdog(600.0, 9.0, adapts=True).checked(running(0), activity, now) == expected
    fixed = Watchdog(600.0, 9.0).checked(running(0), Activity(), 3701.0)
    assert fixed.endswith(f"; {ALONE} 6 x hang_timeout_s")
