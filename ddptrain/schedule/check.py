"""Finds models whose last successful retraining is older than their schedule allows, and notifies users once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING

from ddptrain.config.load import load_config
from ddptrain.errors import DdptrainError, UsageError
from ddptrain.model_registry.model_reader import ModelReader
from ddptrain.model_registry.retrainings import RetrainRecord, RetrainRecords
from ddptrain.retrain.ownership import is_being_retrained
from ddptrain.schedule.entries import Entry

if TYPE_CHECKING:
    from ddptrain.config.resolved import ResolvedConfig

GRACE = timedelta(minutes=10)  # a start may be so late
_READ_RECORDS = 20


class State(StrEnum):
    """The state of a model with a schedule."""

    OK = "ok"
    WAITING = "waiting"  # no scheduled time is due since the schedule was installed
    RUNNING = "running"  # it is being retrained
    LATE = "late"
    UNKNOWN = "unknown"  # it could not be checked


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one model, and why in one line. last: its newest retraining. succeeded: its last success.

    notified: the targets that got the message now. warnings: messages that were not delivered, in lines.
    """

    entry: Entry
    state: State
    reason: str
    last: RetrainRecord | None = None
    succeeded: datetime | None = None
    notified: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def check(entry: Entry, *, notify: bool = False) -> Finding:
    """Check one model. notify: whether to notify users that it is late, once until the next success. Raises nothing."""
    try:
        with _as_scheduled(entry):
            resolved = load_config(entry.config)
            place = entry.environment.get("DDPTRAIN_MODELS_DIR") or resolved.config.models.dir
            registry = ModelReader.open(place)
            records = RetrainRecords(registry.folder, entry.model)
            newest = records.newest(_READ_RECORDS)
            finding = judge(entry, newest, datetime.now(UTC))
            if finding.state is State.LATE and is_being_retrained(registry.folder, entry.model):
                finding = replace(finding, state=State.RUNNING, reason="it is being retrained")
            if notify and finding.state is State.LATE:
                finding = _notify(finding, resolved, records, registry)
            return finding
    except DdptrainError as error:
        return Finding(entry, State.UNKNOWN, str(error).replace("\n", "; "))


def judge(entry: Entry, newest: Sequence[RetrainRecord], now: datetime) -> Finding:
    """Return whether no retraining has succeeded since the latest scheduled time that is GRACE ago. newest: first."""
    slot = entry.schedule.latest(now - GRACE)
    last = newest[0] if newest else None
    ends = [datetime.fromisoformat(record.ended_at) for record in newest if record.ended_at and record.is_success]
    succeeded = max(ends, default=None)
    if succeeded is not None and succeeded >= slot:
        return Finding(entry, State.OK, f"last success {succeeded:%Y-%m-%d %H:%M} UTC", last, succeeded)
    if slot <= (added := datetime.fromisoformat(entry.added_at)):
        return Finding(
            entry, State.WAITING, f"first at {entry.schedule.next(added):%Y-%m-%d %H:%M} UTC", last, succeeded
        )
    reason = f"no retraining has succeeded since the scheduled time {slot:%Y-%m-%d %H:%M} UTC"
    if last is None:
        reason += "; none was ever started"
    elif datetime.fromisoformat(last.started_at) < slot:
        reason += "; none was started since then"
    else:
        state = "has no recorded end: its process was killed" if last.is_running else f"ended as {last.status}"
        reason += f"; retraining {last.number} {state}{f': {last.reason}' if last.reason else ''}"
    return Finding(entry, State.LATE, reason, last, succeeded)


def _notify(finding: Finding, resolved: ResolvedConfig, records: RetrainRecords, registry: ModelReader) -> Finding:
    """Notify users that the model is late, once until the next success."""
    settings, told = resolved.config.notify, records.late_told()
    is_known = told and (finding.succeeded is None or datetime.fromisoformat(told) > finding.succeeded)
    if "late" not in settings.on or not settings.urls or is_known:
        return finding
    from ddptrain.notify.sender import send
    from ddptrain.retrain.messages import compose

    champion = registry.state(finding.entry.model).version_of("champion")
    record = RetrainRecord(
        0, finding.entry.model, finding.entry.added_at, status="late", reason=finding.reason, champion=champion
    )
    message = compose("late", record, resolved)
    delivered = send(message, settings.urls, secrets=resolved.secrets)
    notified = tuple(each.target for each in delivered if each.delivered)
    if notified:  # otherwise the next check tries again
        records.record_late()
    return replace(finding, notified=notified, warnings=tuple(each.warning for each in delivered if each.warning))


@contextmanager
def _as_scheduled(entry: Entry) -> Iterator[None]:
    """During the block, use the working directory and the secret variables of the schedule. Raises UsageError."""
    folder, added = os.getcwd(), {k: v for k, v in entry.secret_values().items() if k not in os.environ}
    try:
        os.chdir(entry.workdir)
    except OSError as error:
        raise UsageError(f"cannot enter the folder {entry.workdir}: {error.strerror}") from None
    try:
        os.environ.update(added)
        yield
    finally:
        os.chdir(folder)
        for name in added:
            os.environ.pop(name, None)
