from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddptrain.results.run import Run
from ddptrain.results.run_record import AttemptRecord, RunRecord
from ddptrain.results.time_use import time_use, timed_events

START = 1735689600.0


def iso(at_s: float) -> str:
    return datetime.fromtimestamp(START + at_s, UTC).isoformat()


def attempt(
    number: int, began: float, ended: float | None, outcome: str | None, resumed_from: int | None = None
) -> Any:
    ended_at = None if ended is None else iso(ended)
    return AttemptRecord(number, iso(began), ended_at, 2, outcome, resumed_from=resumed_from)


def event(kind: str, at_s: float, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "time_s": START + at_s, "run_s": at_s, **fields}


def training(number: int, began: float, entered: float) -> list[dict[str, Any]]:
    return [event("run_started", began, attempt=number), event("entered", entered - 1), event("entered", entered)]


def ended(at_s: float) -> dict[str, Any]:
    return event("attempt_ended", at_s)


def timed(activity: str, ended: float, seconds: float) -> dict[str, Any]:
    return event("timed", ended, activity=activity, seconds=seconds)


def parts(record: RunRecord, events: list[dict[str, Any]], duration_s: float) -> dict[str, float]:
    found = time_use(record, events, duration_s)
    assert sum(asdict(found).values()) == pytest.approx(duration_s)
    return {name: seconds for name, seconds in found.as_dict().items() if seconds > 1e-6}


def test_a_run_that_succeeded() -> None:
    record = RunRecord(started_at=iso(0), ended_at=iso(40), attempts=(attempt(1, 3, 38, "succeeded"),))
    events = [
        *training(1, 3, 10),
        timed("evaluation", 20, 2),
        timed("checkpoint", 21, 0.5),
        timed("something else", 25, 3),
        event("finished", 34),
        event("finished", 35),
        ended(38),
        event("run_finished", 40),
    ]
    expected = {"queue": 3, "start": 7, "training": 22.5, "checkpoints": 0.5, "evaluation": 2, "end": 5}
    assert parts(record, events, 40) == expected


def test_waits_and_the_first_step_are_no_training() -> None:
    record = RunRecord(started_at=iso(0), ended_at=iso(40), attempts=(attempt(1, 3, 38, "succeeded"),))
    events = [
        *training(1, 3, 10),
        timed("first step", 14, 5),  # it was measured from before all ranks had entered
        timed("data", 24, 1),
        timed("data", 34, 2),
        timed("ranks", 34, 6),
        event("finished", 34),
        event("run_finished", 40),
    ]
    expected = {"queue": 3, "start": 7, "first_step": 4, "training": 11, "data": 3, "ranks": 6, "end": 6}
    assert parts(record, events, 40) == expected
    assert time_use(record, events, 40).goodput == pytest.approx(11 / 40)


def test_training_after_the_last_checkpoint_of_a_failed_attempt_is_lost() -> None:
    attempts = (attempt(1, 2, 50, "failed"), attempt(2, 53, 90, "succeeded", resumed_from=4))
    record = RunRecord(started_at=iso(0), ended_at=iso(91), attempts=attempts)
    events = [
        *training(1, 2, 10),
        event("checkpoint_staged", 20, step=2),
        event("checkpoint_staged", 30, step=4),
        timed("checkpoint", 30, 1),
        timed("checkpoint", 45, 1),  # of a checkpoint that was damaged: lost as well
        ended(50),
        *training(2, 53, 60),
        event("finished", 90),
        event("run_finished", 91),
    ]
    expected = {"queue": 2, "start": 8, "training": 49, "checkpoints": 1, "lost": 20, "restarts": 10, "end": 1}
    assert parts(record, events, 91) == expected


def test_without_a_checkpoint_all_of_a_failed_attempt_is_lost() -> None:
    attempts = (attempt(1, 2, 50, "failed"), attempt(2, 53, 90, "succeeded"))
    record = RunRecord(started_at=iso(0), ended_at=iso(90), attempts=attempts)
    events = [*training(1, 2, 10), ended(50), *training(2, 53, 60), event("finished", 90), ended(90)]
    assert parts(record, events, 90) == {"queue": 2, "start": 8, "training": 30, "lost": 40, "restarts": 10}


def test_a_failure_at_the_end_is_not_lost_training_but_one_before_training_is_a_start() -> None:
    failed = RunRecord(started_at=iso(0), ended_at=iso(30), attempts=(attempt(1, 1, 29, "failed"),))
    assert parts(failed, [*training(1, 1, 5), ended(29)], 30) == {"queue": 1, "start": 4, "training": 24, "end": 1}
    assert parts(failed, [event("run_started", 1, attempt=1), ended(29)], 30) == {"queue": 1, "start": 28, "end": 1}


def test_a_resumed_run_goes_on_where_it_ended() -> None:
    attempts = (attempt(1, 2, 20, "preempted"), attempt(2, 1005, 1030, "succeeded", resumed_from=7))
    record = RunRecord(started_at=iso(0), ended_at=iso(1031), resumed_at=iso(1000), earlier_s=21.0, attempts=attempts)
    events = [
        event("driver_started", 0),
        *training(1, 2, 5),
        event("checkpoint_staged", 19, step=7),
        ended(20),
        event("run_finished", 21),
        event("driver_started", 21),
        *training(2, 26, 31),
        event("finished", 51),
        ended(51),
        event("run_finished", 52),
    ]
    assert parts(record, events, 52) == {"queue": 7, "start": 8, "training": 35, "end": 2}


def test_a_run_whose_drivers_were_killed() -> None:
    attempts = tuple(attempt(number, 0, None, "failed") for number in (1, 2, 3))
    record = RunRecord(started_at=iso(0), ended_at=iso(0), attempts=attempts)
    events = [
        line
        for number, began in ((1, 0), (2, 10), (3, 20))
        for line in (event("driver_started", began), *training(number, began + 1, began + 4), ended(began + 8))
    ]
    last = [event("driver_started", 10), *events[6:]]  # the first driver was killed in its attempt
    assert parts(record, events, 30) == {"queue": 3, "start": 9, "training": 4, "lost": 8, "end": 2, "other": 4}
    assert parts(record, [*events[:4], *last], 30)["queue"] == 3


def test_a_run_that_is_running_or_waits() -> None:
    record = RunRecord(started_at=iso(0), attempts=(attempt(1, 2, None, None),))
    assert parts(record, training(1, 2, 5), 25) == {"queue": 2, "start": 3, "training": 20}
    assert parts(RunRecord(started_at=iso(0)), [], 25) == {"queue": 25}


def test_attempt_without_ranks_is_a_start() -> None:
    empty = AttemptRecord(1, iso(3), iso(5), 0, "failed")
    record = RunRecord(started_at=iso(0), ended_at=iso(6), attempts=(empty,))
    assert parts(record, [event("run_started", 3, attempt=1), ended(5)], 6) == {"queue": 3, "start": 2, "end": 1}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["entered", "finished", "checkpoint_staged", "timed", "run_finished", "run_started"]),
            st.floats(-100, 300),
            st.integers(0, 4),
            st.floats(-50, 500),
        ),
        max_size=30,
    ),
    st.lists(st.tuples(st.floats(-10, 200), st.floats(-10, 200)), max_size=4),
    st.floats(0, 250),
    st.none() | st.floats(0, 100),
)
def test_the_sum_is_the_duration_whatever_was_recorded(
    told: list[tuple[str, float, int, float]],
    times: list[tuple[float, float]],
    duration_s: float,
    resumed_at: float | None,
) -> None:
    attempts = tuple(attempt(n, began, ended, "failed", n) for n, (began, ended) in enumerate(times))
    resumed = None if resumed_at is None else iso(resumed_at)
    record = RunRecord(started_at=iso(0), ended_at=iso(200), resumed_at=resumed, earlier_s=3, attempts=attempts)
    events = [
        event(kind, at_s, attempt=number, step=number, seconds=seconds, activity="checkpoint")
        for kind, at_s, number, seconds in told
    ]
    found = asdict(time_use(record, events, duration_s))
    assert sum(found.values()) == pytest.approx(duration_s, abs=1e-3)
    assert min(found.values()) >= 0


def test_events_are_read_from_the_file_of_anyone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    good = json.dumps(event("entered", 1), separators=(",", ":"))
    lines = [
        good,
        '{"event":"entered"',
        '{"event":"entered","time_s":"x"}',
        "[1]",
        '{"event":"entered","time_s":NaN}',
        '{"event":"notice","time_s":1}',
    ]
    lines += ['{"event":"timed","time_s":1,"seconds":1e999}', f'{{"event":"entered","time_s":1{"0" * 400}}}']
    path.write_text("\n".join([*lines, f'{{"event":"entered","x":"{"y" * (1 << 20)}","time_s":1}}', good]) + "\n")
    assert list(timed_events(Run(tmp_path))) == [event("entered", 1)] * 2
    assert list(timed_events(Run(tmp_path / "missing"))) == []


def test_activities_that_overlap_count_once_and_only_within_the_training() -> None:
    record = RunRecord(started_at=iso(0), ended_at=iso(20), attempts=(attempt(1, 0, 20, "succeeded"),))
    events = [
        *training(1, 0, 5),
        timed("checkpoint", 7, 4.0),  # 2 s of it since the ranks have entered
        timed("evaluation", 21, 3.0),  # 2 s of it before the end
        timed("first step", 12, 5.0),
        timed("data", 14, 20.0),  # 9 s since the ranks have entered; 6 s are left
        timed("ranks", 19, -1.0),
        timed("other", 19, 1.0),
    ]
    assert parts(record, events, 20.0) == {
        "start": 5.0,
        "checkpoints": 2.0,
        "evaluation": 2.0,
        "first_step": 5.0,
        "data": 6.0,
    }
