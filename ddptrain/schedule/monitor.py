"""Checks whether the retraining of a scheduled model is late, and notifies users."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from ddptrain.config.load import load_config
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.errors import DdptrainError, UsageError
from ddptrain.log import Log
from ddptrain.model_registry.model_reader import ModelReader
from ddptrain.retrain.ownership import is_being_retrained
from ddptrain.retrain.records import RetrainRecord, RetrainRecords, RetrainStatus
from ddptrain.schedule.due_times import Schedule, slot_text
from ddptrain.schedule.entries import Entry
from ddptrain.schedule.job import env_file, read_env_file
from ddptrain.storage.remote_folder import is_url

_READ_RECORDS = 20
_READ_FOR_MISSED = 120
_LATE = "late"
_log = Log(__name__)
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
    ends = [end for record in records if record.status in _SUCCESSES and (end := ended(record))]
    succeeded = max((end for end in ends if end <= now + allowed), default=None)  # a later one is of a wrong clock
    if succeeded is not None and succeeded >= slot:
        return Judgement(State.OK, slot, f"last success {succeeded:%Y-%m-%d %H:%M} UTC", succeeded)
    if since is not None and slot <= since <= now:  # a later one is of a wrong clock
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
    is_running: bool = False,
) -> list[datetime]:
    """Return the scheduled times at which nothing was started, oldest first: of 30 days, and at most of 100 times.

    A time counts as started if a retraining or a skip names it, began before the next time, or was running then.
    is_running: whether a process retrains the model now; otherwise, a retraining without an end was killed.
    """
    span = min(timedelta(days=_MOST_DAYS), _MOST_TIMES * schedule.shortest_interval(now))
    times = list(schedule.between(max(since, now - span), now - allowed))
    named = {record.slot for record in records} | set(skipped_slots)

    def span_of(record: RetrainRecord) -> tuple[datetime, datetime]:
        start, end = datetime.fromisoformat(record.started_at), ended(record)
        if record.status == RetrainStatus.ABANDONED:  # it had ended long before this was recorded
            return start, start
        return start, end or (now if is_running else start)

    spans = [span_of(record) for record in records]
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
    none = f"none of the newest {len(records)} has succeeded"
    none = none if len(records) >= _READ_RECORDS else "none has succeeded before"
    last = f"the last success was {succeeded:%Y-%m-%d %H:%M} UTC" if succeeded else none
    if not records:
        return f"{reason_start}; none was ever started"
    newest = records[0]
    if datetime.fromisoformat(newest.started_at) < slot:
        return f"{reason_start}; none was started since then; {last}"
    state = "has no recorded end: its process was killed" if newest.is_running else f"ended as {newest.status}"
    reason = f": {newest.reason}" if newest.reason else ""
    return f"{reason_start}; {last}; retraining {newest.number} {state}{reason}"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one model. problem: why it could not be looked at, in one line; then `judgement` is None.

    notified: the targets that got the message now. warnings: messages that were not delivered, in lines.
    """

    name: str
    model: str = ""
    judgement: Judgement | None = None
    problem: str = ""
    last: RetrainRecord | None = None
    next: datetime | None = None
    missed: tuple[datetime, ...] = ()
    notified: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def is_late(self) -> bool:
        """Whether the model is late."""
        return self.judgement is not None and self.judgement.state is State.LATE


def look(entry: Entry, grace: timedelta, *, notify: bool = False, with_missed: bool = False) -> Finding:
    """Check one model. notify: whether to notify users that it is late, once until the next success. Raises nothing.

    with_missed: whether `missed` is filled in, which reads more records.
    """
    try:
        with _as_scheduled(entry):
            return _look(entry, grace, notify=notify, with_missed=with_missed)
    except DdptrainError as error:
        _log.warning("schedule not checked", schedule=entry.name, reason=str(error))
        return Finding(entry.name, problem=str(error).replace("\n", "; "), next=entry.schedule.next(_now()))


def _look(entry: Entry, grace: timedelta, *, notify: bool, with_missed: bool) -> Finding:
    resolved = load_config(entry.config)
    model = resolved.retrain.model
    place = entry.models_dir or resolved.config.models.dir
    registry = ModelReader.open(place if is_url(place) else os.path.join(entry.workdir, Path(place).expanduser()))
    retrainings = RetrainRecords(registry.folder, model)
    records = retrainings.newest(_READ_FOR_MISSED if with_missed else _READ_RECORDS)
    now, allowed = _now(), timedelta(seconds=entry.jitter_s) + grace
    judgement = judge(entry.schedule, records, now, allowed=allowed, since=entry.added)
    owned = [None, *(record.number for record in records if record.is_running)]  # `overlap: allow`: each has a lock
    is_asked = with_missed or judgement.state is State.LATE
    is_running = is_asked and any(is_being_retrained(registry.folder, model, each) for each in owned)
    if judgement.state is State.LATE and is_running:
        judgement = judge(entry.schedule, records, now, allowed=allowed, since=entry.added, is_running=True)
    missed: Sequence[datetime] = ()
    if with_missed and entry.added is not None:
        slots = [str(skip.get("slot", "")) for skip in retrainings.skips()]
        missed = missed_times(
            entry.schedule, records, slots, now, allowed=allowed, since=entry.added, is_running=is_running
        )
    notified: list[str] = []
    warnings: list[str] = []
    if notify and judgement.state is State.LATE:
        notified, warnings = _tell_once(entry, resolved, retrainings, judgement, registry)
    return Finding(
        name=entry.name,
        model=model,
        judgement=judgement,
        last=records[0] if records else None,
        next=entry.schedule.next(now),
        missed=tuple(missed),
        notified=tuple(notified),
        warnings=tuple(warnings),
    )


def _tell_once(
    entry: Entry, resolved: ResolvedConfig, retrainings: RetrainRecords, judgement: Judgement, registry: ModelReader
) -> tuple[list[str], list[str]]:
    """Notify users that the model is late, once; return the targets that were notified, and undelivered messages."""
    config = resolved.config
    if _LATE not in config.notify.on or not config.notify.urls:
        return [], []
    before = retrainings.late_told()
    if before and (judgement.succeeded is None or datetime.fromisoformat(before) > judgement.succeeded):
        return [], []
    from ddptrain.notify.messages import RetrainReport, compose
    from ddptrain.notify.sender import send

    report = RetrainReport(
        event=_LATE,
        model=resolved.retrain.model,
        status=_LATE,
        reason=judgement.reason,
        champion=registry.state(resolved.retrain.model).version_of("champion"),
        host=socket.gethostname(),
        folder=entry.workdir,
        config=entry.config,
        runs_dir=config.results.dir,
        models_dir=config.models.dir,
    )
    delivered = send(compose(report), config.notify.urls, timeout_s=config.notify.timeout_s, secrets=resolved.secrets)
    notified = [each.target for each in delivered if each.delivered]
    if notified:  # otherwise the next check tries again
        retrainings.record_late()
    return notified, [each.warning for each in delivered if each.warning]


@contextmanager
def _as_scheduled(entry: Entry) -> Iterator[None]:
    """During the block, use the working directory and the secret variables of the schedule. Raises UsageError."""
    before, folder = dict(os.environ), os.getcwd()
    added = read_env_file(env_file(entry.name)) if entry.added else {}
    try:
        os.chdir(entry.workdir)
    except OSError as error:
        raise UsageError(f"cannot enter the folder {entry.workdir}: {error.strerror}") from None
    try:
        os.environ.update({name: value for name, value in added.items() if name not in before})
        yield
    finally:
        os.chdir(folder)
        for name in added.keys() - before.keys():
            os.environ.pop(name, None)


def _now() -> datetime:
    return datetime.now(UTC)
