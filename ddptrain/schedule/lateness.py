"""Whether a model has been retrained as its schedule says. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import pairwise

from ddptrain.retrain.records import RetrainRecord, RetrainStatus
from ddptrain.schedule.times import Schedule, slot_text

_MOST_DAYS = 30
_MOST_TIMES = 100
_SUCCESSES = [status for status in RetrainStatus if status.is_success]


class State(StrEnum):
    """The state of a model with a schedule."""

    OK = "ok"
    RUNNING = "running"  # no success yet, but it is being retrained
    WAITING = "waiting"  # no success yet, but no scheduled time is due since the schedule was installed
    LATE = "late"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The state, and why in one line. slot: the scheduled time that counts. succeeded: the end of the last success."""

    state: State
    slot: datetime
    reason: str
    succeeded: datetime | None = None


def judge(
    schedule: Schedule,
    records: Sequence[RetrainRecord],
    now: datetime,
    *,
    allowed: timedelta,
    since: datetime | None = None,
    is_running: bool = False,
) -> Judgement:
    """Return the state of a model.

    records: its retrainings, newest first. allowed: the time that a start may be delayed (jitter and grace time).
    since: when the schedule was installed. is_running: whether a process retrains the model now.

    It is late if no retraining has succeeded since the latest scheduled time that is `allowed` ago, and none runs.
    """
    slot = schedule.latest(now - allowed)
    succeeded = max((end for record in records if record.status in _SUCCESSES and (end := ended(record))), default=None)
    if succeeded is not None and succeeded >= slot:
        return Judgement(State.OK, slot, f"last success {succeeded:%Y-%m-%d %H:%M} UTC", succeeded)
    if since is not None and slot <= since:
        return Judgement(State.WAITING, slot, f"first at {schedule.next(since):%Y-%m-%d %H:%M} UTC", succeeded)
    if is_running:
        return Judgement(State.RUNNING, slot, "it is being retrained", succeeded)
    return Judgement(State.LATE, slot, _why_late(slot, records, succeeded), succeeded)


def missed_times(
    schedule: Schedule,
    records: Iterable[RetrainRecord],
    skipped_slots: Iterable[str],
    now: datetime,
    *,
    allowed: timedelta,
    since: datetime,
) -> list[datetime]:
    """Return the scheduled times at which nothing was started, oldest first: of 30 days, and at most of 100 times.

    A time counts as started if a retraining or a skip names it, began before the next time, or was running then.
    """
    span = min(timedelta(days=_MOST_DAYS), _MOST_TIMES * schedule.shortest_interval(now))
    times = list(schedule.between(max(since, now - span), now - allowed))
    named = {record.slot for record in records} | set(skipped_slots)
    spans = [(datetime.fromisoformat(record.started_at), ended(record) or now) for record in records]
    return [
        time
        for time, following in pairwise([*times, now])
        if slot_text(time) not in named
        and not any(time <= start < following or start <= time <= end for start, end in spans)
    ]


def ended(record: RetrainRecord) -> datetime | None:
    """Return when a retraining has ended; None if it has not."""
    return datetime.fromisoformat(record.ended_at) if record.ended_at else None


def _why_late(slot: datetime, records: Sequence[RetrainRecord], succeeded: datetime | None) -> str:
    reason_start = f"no retraining has succeeded since the scheduled time {slot:%Y-%m-%d %H:%M} UTC"
    last = f"the last success was {succeeded:%Y-%m-%d %H:%M} UTC" if succeeded else "none has succeeded before"
    if not records:
        return f"{reason_start}; none was ever started"
    newest = records[0]
    if datetime.fromisoformat(newest.started_at) < slot:
        return f"{reason_start}; none was started since then; {last}"
    state = "has no end, its process was killed" if newest.is_running else f"ended as {newest.status}"
    reason = f": {newest.reason}" if newest.reason else ""
    return f"{reason_start}; {last}; retraining {newest.number} {state}{reason}"
