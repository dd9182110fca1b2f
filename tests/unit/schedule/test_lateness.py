"""Late or not: a table of retrainings, and the times that were missed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from ddptrain.retrain.records import RetrainRecord
from ddptrain.schedule.due_times import parse_schedule
from ddptrain.schedule.monitor import State, judge, missed_times

NIGHTLY = parse_schedule("03:00")
GRACE = timedelta(minutes=10)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def record(number: int, start: str, end: str | None, status: str, slot: str = "", reason: str = "") -> RetrainRecord:
    return RetrainRecord(
        number=number,
        model="petnames",
        run_id="",
        started_at=f"{start}:00.000Z",
        ended_at=f"{end}:00.000Z" if end else None,
        status=status,
        slot=slot,
        reason=reason,
    )


YESTERDAY = record(1, "2026-11-21T03:00", "2026-11-21T03:30", "promoted")


@pytest.mark.parametrize(
    ("now", "records", "state"),
    [
        ("2026-11-22T03:09:59", [YESTERDAY], State.OK),  # within the grace time
        ("2026-11-22T03:10:00", [YESTERDAY], State.LATE),
        ("2026-11-22T03:10", [record(2, "2026-11-22T03:00", "2026-11-22T03:05", "unchanged"), YESTERDAY], State.OK),
        ("2026-11-22T03:10", [record(2, "2026-11-22T02:50", "2026-11-22T03:05", "promoted"), YESTERDAY], State.OK),
        ("2026-11-22T03:10", [record(2, "2026-11-22T02:50", "2026-11-22T02:59", "promoted")], State.LATE),
        ("2026-11-22T03:10", [record(2, "2026-11-22T03:00", "2026-11-22T03:05", "failed"), YESTERDAY], State.LATE),
        ("2026-11-22T03:10", [record(2, "2026-11-22T03:00", "2026-11-22T03:05", "rejected"), YESTERDAY], State.LATE),
        ("2026-11-22T03:10", [record(2, "2026-11-22T03:00", "2026-11-22T03:05", "deadline"), YESTERDAY], State.LATE),
        ("2026-11-22T03:10", [record(2, "2026-11-22T03:00", None, "running"), YESTERDAY], State.LATE),  # killed
        ("2026-11-22T09:00", [], State.LATE),
        ("2026-11-22T03:10", [record(2, "2031-01-01T03:00", "2031-01-01T03:05", "promoted")], State.LATE),  # its clock
        ("2026-11-22T03:10", [record(2, "2026-11-22T03:00", "2026-11-22T03:11", "promoted")], State.OK),  # a minute off
        # A failure after a success for the same time does no harm.
        (
            "2026-11-22T09:00",
            [
                record(3, "2026-11-22T08:00", "2026-11-22T08:01", "failed"),
                record(2, "2026-11-22T03:00", "2026-11-22T03:05", "promoted"),
            ],
            State.OK,
        ),
    ],
)
def test_state(now: str, records: list[RetrainRecord], state: State) -> None:
    assert judge(NIGHTLY, records, utc(now), allowed=GRACE).state is state


def test_model_that_is_being_retrained_is_not_late() -> None:
    records = [record(2, "2026-11-22T03:00", None, "running"), YESTERDAY]
    assert judge(NIGHTLY, records, utc("2026-11-22T09:00"), allowed=GRACE, is_running=True).state is State.RUNNING


@pytest.mark.parametrize(("since", "state"), [("2026-11-22T03:00:01", State.WAITING), ("2026-11-22T02:59", State.LATE)])
def test_times_before_the_installation_do_not_count(since: str, state: State) -> None:
    judgement = judge(NIGHTLY, [], utc("2026-11-22T09:00"), allowed=GRACE, since=utc(since))
    assert judgement.state is state
    if state is State.WAITING:
        assert judgement.reason == "first at 2026-11-23 03:00 UTC"


def test_installation_with_a_wrong_clock_does_not_hide_that_a_model_is_late() -> None:
    assert judge(NIGHTLY, [], utc("2026-11-22T09:00"), allowed=GRACE, since=utc("2031-01-01")).state is State.LATE


def test_success_of_the_first_time_counts_at_once() -> None:
    since, success = utc("2026-11-22T02:00"), record(1, "2026-11-22T03:00", "2026-11-22T03:05", "promoted")
    judgement = judge(NIGHTLY, [success], utc("2026-11-22T03:06"), allowed=GRACE, since=since)
    assert (judgement.state, judgement.reason) == (State.OK, "last success 2026-11-22 03:05 UTC")


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "none was ever started"),
        ([YESTERDAY], "none was started since then; the last success was 2026-11-21 03:30 UTC"),
        (
            [record(2, "2026-11-22T03:00", "2026-11-22T03:05", "failed", reason="rank 0: no space left"), YESTERDAY],
            "the last success was 2026-11-21 03:30 UTC; retraining 2 ended as failed: rank 0: no space left",
        ),
        (
            [record(2, "2026-11-22T03:00", None, "running")],
            "none has succeeded before; retraining 2 has no recorded end",
        ),
    ],
)
def test_reason_says_what_happened_last(records: list[RetrainRecord], words: str) -> None:
    reason = judge(NIGHTLY, records, utc("2026-11-22T09:00"), allowed=GRACE).reason
    assert reason.startswith("no retraining has succeeded since the scheduled time 2026-11-22 03:00 UTC")
    assert words in reason


def test_missed_times_are_those_without_a_start() -> None:
    records = [
        record(3, "2026-11-18T02:00", "2026-11-18T04:00", "promoted"),  # was running
        record(2, "2026-11-17T08:00", "2026-11-17T09:00", "failed"),  # started later than scheduled
        record(1, "2026-11-22T08:00", "2026-11-22T09:00", "promoted", slot="2026-11-19T03:00:00Z"),  # names the time
    ]
    found = missed_times(
        NIGHTLY,
        records,
        ["2026-11-20T03:00:00Z"],
        utc("2026-11-22T03:05"),
        allowed=GRACE,
        since=utc("2026-11-16T00:00"),
    )
    assert found == [utc("2026-11-16T03:00"), utc("2026-11-21T03:00")]


@pytest.mark.parametrize(("is_running", "missed"), [(True, []), (False, ["2026-11-19T03:00", "2026-11-20T03:00"])])
def test_retraining_that_was_killed_does_not_hide_the_times_after_it(is_running: bool, missed: list[str]) -> None:
    killed = record(1, "2026-11-18T03:00", None, "running", slot="2026-11-18T03:00:00Z")
    now, since = utc("2026-11-20T09:00"), utc("2026-11-18T00:00")
    found = missed_times(NIGHTLY, [killed], [], now, allowed=GRACE, since=since, is_running=is_running)
    assert found == [utc(time) for time in missed]


def test_retraining_that_was_abandoned_later_does_not_hide_the_times_before() -> None:
    abandoned = record(1, "2026-11-18T03:00", "2026-11-20T08:00", "abandoned", slot="2026-11-18T03:00:00Z")
    now, since = utc("2026-11-20T09:00"), utc("2026-11-18T00:00")
    found = missed_times(NIGHTLY, [abandoned], [], now, allowed=GRACE, since=since)
    assert found == [utc("2026-11-19T03:00"), utc("2026-11-20T03:00")]


def test_reason_does_not_claim_that_none_has_ever_succeeded() -> None:
    failed = [record(50 - n, "2026-11-22T03:00", "2026-11-22T03:05", "failed") for n in range(20)]
    reason = judge(NIGHTLY, failed, utc("2026-11-22T09:00"), allowed=GRACE).reason
    assert "; none of the newest 20 has succeeded; retraining 50 ended as failed" in reason


def test_missed_times_of_a_short_interval_are_bounded() -> None:
    every_minute = parse_schedule("every 1m")
    now = utc("2026-11-22T03:00:30")
    found = missed_times(every_minute, [], [], now, allowed=timedelta(), since=utc("2020-01-01"))
    assert (len(found), found[-1]) == (100, utc("2026-11-22T03:00"))
