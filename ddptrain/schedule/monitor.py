"""Looks at the retrainings of models with a schedule, and tells users that a model is late."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.config.load import load_config
from ddptrain.errors import DdptrainError, UsageError
from ddptrain.log import Log
from ddptrain.model_registry.model_reader import ModelReader
from ddptrain.retrain.ownership import is_being_retrained
from ddptrain.retrain.records import RetrainRecord, RetrainRecords
from ddptrain.schedule.entries import Entry
from ddptrain.schedule.job import env_file, read_env_file
from ddptrain.schedule.lateness import Judgement, State, judge, missed_times
from ddptrain.schedule.times import Schedule
from ddptrain.storage.remote_folder import is_url

if TYPE_CHECKING:
    from ddptrain.config.resolved import ResolvedConfig

_READ_RECORDS = 20
_READ_FOR_MISSED = 120
_LATE = "late"
_log = Log(__name__)


@dataclass(frozen=True, slots=True)
class Watched:
    """A model that should be retrained on a schedule. name: of the installed schedule, or the configuration.

    since: when the schedule was installed; None if it is not known. secrets_file: the file with secret variables.
    models_dir: the registry; "" for the one of the configuration.
    """

    name: str
    config: Path
    workdir: Path
    schedule: Schedule
    jitter_s: int = 0
    since: datetime | None = None
    secrets_file: Path | None = None
    models_dir: str = ""

    @classmethod
    def of(cls, entry: Entry) -> Watched:
        """Return what an installed schedule watches."""
        return cls(
            name=entry.name,
            config=Path(entry.config),
            workdir=Path(entry.workdir),
            schedule=entry.schedule,
            jitter_s=entry.jitter_s,
            since=entry.added,
            secrets_file=env_file(entry.name),
            models_dir=entry.models_dir,
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one model. problem: why it could not be looked at, in one line; then `judgement` is None.

    told: the targets that got the message now. warnings: messages that were not delivered, in lines.
    """

    name: str
    model: str = ""
    judgement: Judgement | None = None
    problem: str = ""
    last: RetrainRecord | None = None
    next: datetime | None = None
    missed: tuple[datetime, ...] = ()
    told: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def is_late(self) -> bool:
        """Whether the model is late."""
        return self.judgement is not None and self.judgement.state is State.LATE


def look(watched: Watched, grace: timedelta, *, notify: bool = False, with_missed: bool = False) -> Finding:
    """Look at one model. notify: whether users are told that it is late, once until the next success. Raises nothing.

    with_missed: whether `missed` is filled in, which reads more records.
    """
    try:
        with _as_scheduled(watched):
            return _look(watched, grace, notify=notify, with_missed=with_missed)
    except DdptrainError as error:
        _log.warning("schedule not checked", schedule=watched.name, reason=str(error))
        return Finding(watched.name, problem=str(error).replace("\n", "; "), next=watched.schedule.next(_now()))


def _look(watched: Watched, grace: timedelta, *, notify: bool, with_missed: bool) -> Finding:
    resolved = load_config(watched.config)
    config = resolved.config
    if config.retrain is None:
        raise UsageError(f"{watched.config}: retrain: is missing, so it can't have a schedule")
    model = config.retrain.model
    place = watched.models_dir or config.models.dir
    registry = ModelReader.open(place if is_url(place) else str(watched.workdir / Path(place).expanduser()))
    retrainings = RetrainRecords(registry.folder, model)
    records = retrainings.newest(_READ_FOR_MISSED if with_missed else _READ_RECORDS)
    now, allowed = _now(), timedelta(seconds=watched.jitter_s) + grace
    judgement = judge(watched.schedule, records, now, allowed=allowed, since=watched.since)
    if judgement.state is State.LATE and is_being_retrained(registry.folder, model):
        judgement = judge(watched.schedule, records, now, allowed=allowed, since=watched.since, is_running=True)
    missed: Sequence[datetime] = ()
    if with_missed and watched.since is not None:
        slots = [str(skip.get("slot", "")) for skip in retrainings.skips()]
        missed = missed_times(watched.schedule, records, slots, now, allowed=allowed, since=watched.since)
    notified: list[str] = []
    warnings: list[str] = []
    if notify and judgement.state is State.LATE:
        notified, warnings = _tell_once(watched, resolved, retrainings, judgement, registry)
    return Finding(
        name=watched.name,
        model=model,
        judgement=judgement,
        last=records[0] if records else None,
        next=watched.schedule.next(now),
        missed=tuple(missed),
        told=tuple(notified),
        warnings=tuple(warnings),
    )


def _tell_once(
    watched: Watched, resolved: ResolvedConfig, retrainings: RetrainRecords, judgement: Judgement, registry: ModelReader
) -> tuple[list[str], list[str]]:
    """Tell users that the model is late, unless they know it; return who was told, and what was not delivered."""
    config = resolved.config
    if _LATE not in config.notify.on or not config.notify.urls:
        return [], []
    before = retrainings.late_told()
    if before and (judgement.succeeded is None or datetime.fromisoformat(before) > judgement.succeeded):
        return [], []
    from ddptrain.notify.messages import RetrainReport, compose
    from ddptrain.notify.sender import send

    assert config.retrain is not None
    report = RetrainReport(
        event=_LATE,
        model=config.retrain.model,
        status=_LATE,
        reason=judgement.reason,
        champion=registry.state(config.retrain.model).version_of("champion"),
        host=socket.gethostname(),
        folder=str(watched.workdir),
        config=str(watched.config),
        runs_dir=config.results.dir,
        models_dir=config.models.dir,
    )
    delivered = send(compose(report), config.notify.urls, timeout_s=config.notify.timeout_s, secrets=resolved.secrets)
    notified = [each.target for each in delivered if each.delivered]
    if notified:  # otherwise the next check tries again
        retrainings.record_late()
    return notified, [each.warning for each in delivered if each.warning]


@contextmanager
def _as_scheduled(watched: Watched) -> Iterator[None]:
    """Enter the folder in which the schedule runs, with its secret variables, for the block. Raises UsageError."""
    before, folder = dict(os.environ), os.getcwd()
    added: Mapping[str, str] = read_env_file(watched.secrets_file) if watched.secrets_file else {}
    try:
        os.chdir(watched.workdir)
    except OSError as error:
        raise UsageError(f"cannot enter the folder {watched.workdir}: {error.strerror}") from None
    try:
        os.environ.update({name: value for name, value in added.items() if name not in before})
        yield
    finally:
        os.chdir(folder)
        for name in added.keys() - before.keys():
            os.environ.pop(name, None)


def _now() -> datetime:
    return datetime.now(UTC)
