"""When a trial starts, and when a sweep ends."""

from __future__ import annotations

import dataclasses

import pytest

from ddptrain.sweep.output import Failures, Limits, Situation, remaining_s

NOW = Situation(chosen=2, waiting=0, running=1, capacity=2, elapsed_s=10.0, ending=False)


@pytest.mark.parametrize(
    ("limits", "change", "starts", "over"),
    [
        (Limits(4, None), {}, True, False),
        (Limits(4, None), {"running": 2}, False, False),  # no room
        (Limits(2, None), {}, False, False),  # all points are chosen, one runs
        (Limits(2, None), {"running": 0}, False, True),
        (Limits(2, None), {"running": 0, "waiting": 1}, True, False),  # a trial of an earlier driver
        (Limits(None, 10.0), {}, False, False),  # the time is over
        (Limits(None, 10.1), {}, True, False),
        (Limits(None, 10.0), {"running": 0}, False, True),
        (Limits(None, 10.0), {"running": 0, "waiting": 1}, True, False),
        (Limits(4, None), {"ending": True}, False, False),
        (Limits(4, None), {"ending": True, "running": 0, "waiting": 2}, False, True),
        (Limits(4, None), {"capacity": 0, "running": 0}, True, False),  # it waits for its slots
    ],
)
def test_limits_decide_what_starts(limits: Limits, change: dict[str, int], starts: bool, over: bool) -> None:
    now = dataclasses.replace(NOW, **change)  # type: ignore[arg-type]
    assert limits.may_start(now) is starts
    assert limits.is_over(now) is over


def test_the_third_equal_failure_ends_the_sweep() -> None:
    failures = Failures()
    assert [failures.add(cause) for cause in ("a", "b", "a", "b", "a")] == [False, False, False, False, True]


def test_remaining_time_follows_the_mean_duration() -> None:
    assert remaining_s([10.0, 20.0], 4, 2) == 30.0
    assert remaining_s([], 4, 2) is None
    assert remaining_s([10.0], None, 2) is None
