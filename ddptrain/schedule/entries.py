"""A scheduled retraining: what the scheduler starts, and when."""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import zoneinfo
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from platformdirs import user_config_path, user_state_path
from pydantic import TypeAdapter

from ddptrain.config.sections.retraining import FROM_ENV
from ddptrain.config.types import NAME_PATTERN
from ddptrain.config.wording import nearest, shorten
from ddptrain.errors import UsageError
from ddptrain.redact import hide_credentials
from ddptrain.storage.store import is_url

if TYPE_CHECKING:
    from ddptrain.config.resolved import ResolvedConfig
    from ddptrain.model_registry.retrainings import RetrainRecord


_KEPT = (
    *("PATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "XDG_STATE_HOME", "DDPTRAIN_MODELS_DIR"),
    *("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"),
)
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "WANDB_API_KEY", "HF_TOKEN")
_TIME_TO_STOP_S = 60  # besides failure.grace_s: to save, and to upload the checkpoint
_ZONE_FILES = "/usr/share/zoneinfo"
# What cron and systemd understand alike; cronsim also knows 5/15, L, # and seconds.
_TERM = r"(?:\*|(?:\d+|[A-Za-z]{3})-(?:\d+|[A-Za-z]{3}))(?:/\d+)?|\d+|[A-Za-z]{3}"
_FIELD = re.compile(rf"(?:{_TERM})(?:,(?:{_TERM}))*")
_WEEK_DAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")


@dataclass(frozen=True, slots=True)
class Entry:
    """A scheduled retraining. All paths are absolute.

    at: a cron expression with its time zone. command: the program and its arguments. environment: the variables that it
    needs, without secrets. secrets: the names of the variables with secrets, whose values are in `env_file`. stop_s:
    the time from SIGTERM to the end. system: whether it is a unit of the system, not of the user.
    models_dir: the folder or URL of the models.
    """

    name: str
    model: str
    config: str
    at: str
    target: Literal["systemd", "cron"]
    workdir: str = ""
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    stop_s: int = _TIME_TO_STOP_S
    system: bool = False
    models_dir: str = ""

    @property
    def schedule(self) -> Schedule:
        """The times."""
        return parse_schedule(self.at)

    def to_json(self) -> str:
        """Return what identifies the entry, on one line; the files around it have the rest."""
        names = {"name", "model", "config", "at", "target", "system", "models_dir"}
        return _ADAPTER.dump_json(self, include=names).decode()

    @classmethod
    def from_json(cls, text: str) -> Entry:
        """Read it. Raises ValueError, UsageError."""
        entry = _ADAPTER.validate_json(text)
        _ = entry.schedule
        return entry

    @property
    def title(self) -> str:
        """A description in one line."""
        return f"ddptrain: retrains {self.model} ({self.at})"

    @property
    def env_file(self) -> Path:
        """The file with the values of `secrets`, which only this user can read."""
        return user_config_path("ddptrain", appauthor=False) / f"{self.name}.env"

    @property
    def log_file(self) -> Path:
        """The log, where the scheduler has none."""
        return user_state_path("ddptrain", appauthor=False) / "schedules" / f"{self.name}.log"

    def last(self) -> RetrainRecord | None:
        """Return the newest retraining of the model. Raises DdptrainError if the registry cannot be read."""
        from ddptrain.model_registry.registry import ModelRegistry
        from ddptrain.model_registry.retrainings import RetrainRecords

        newest = RetrainRecords(ModelRegistry.open(self.models_dir).folder, self.model).newest(1)
        return newest[0] if newest else None


_ADAPTER = TypeAdapter(Entry)


def make_entry(
    resolved: ResolvedConfig,
    schedule: Schedule,
    target: Literal["systemd", "cron"],
    name: str,
    environ: Mapping[str, str],
    *,
    system: bool = False,
) -> Entry:
    """Collect what the scheduler needs for the configuration, as it is used in the working directory.

    name: "" for the name of the model. Raises UsageError.
    """
    config, settings = resolved.config, resolved.retrain
    path, workdir = resolved.path.absolute(), Path.cwd()
    for place in (path, workdir):
        if re.search(r"[\x00-\x1f\x7f]", str(place)):
            raise UsageError(
                f"{shorten(str(place))} contains a line break or another control character, which a scheduler reads as "
                "the end of a setting: rename it"
            )
    name = name or settings.model
    if not re.fullmatch(NAME_PATTERN.rstrip("$"), name) or ".." in name:
        raise UsageError(
            f"{name!r} is not a name of a schedule: use up to 64 lower-case letters, digits, dots, dashes and "
            "underscores, without two dots in a row, beginning with a letter or digit"
        )
    kept = {key: environ[key] for key in _KEPT if environ.get(key)}
    plain = {key: value for key, value in kept.items() if hide_credentials(value) == value and value.isprintable()}
    urls = [*config.notify.urls, config.notify.heartbeat or ""]
    named = {url.removeprefix(FROM_ENV) for url in urls if url.startswith(FROM_ENV)} | (kept.keys() - plain.keys())
    installed = Path(sysconfig.get_path("scripts"), "ddptrain")
    program = (str(installed),) if os.access(installed, os.X_OK) else (sys.executable, "-m", "ddptrain")
    return Entry(
        name=name,
        model=settings.model,
        config=str(path),
        workdir=str(workdir),
        at=str(schedule),
        target=target,
        command=(*program, "retrain", str(path), "--slot", str(schedule), "--output", "plain"),
        environment=plain,
        secrets=tuple(sorted(named | {key for key in _SECRETS if environ.get(key)})),
        stop_s=round(config.failure.grace_s) + _TIME_TO_STOP_S,
        system=system,
        models_dir=config.models.dir if is_url(config.models.dir) else os.path.abspath(config.models.dir),
    )


@dataclass(frozen=True, slots=True)
class Schedule:
    """When something runs: cron, an expression of five fields, in the time zone `zone`.

    The times are those of Debian's cron, also on the days when the clocks change. They are returned in UTC.
    """

    cron: str
    zone: str

    def __str__(self) -> str:
        return f"{self.cron} {self.zone}"

    def latest(self, now: datetime) -> datetime:
        """Return the latest scheduled time that is not after `now`."""
        following = now.replace(microsecond=0) + timedelta(seconds=1)
        return next(CronSim(self.cron, following.astimezone(ZoneInfo(self.zone)), reverse=True)).astimezone(UTC)

    def next(self, now: datetime) -> datetime:
        """Return the first scheduled time after `now`."""
        return next(CronSim(self.cron, now.astimezone(ZoneInfo(self.zone)))).astimezone(UTC)

    def on_calendar(self) -> list[str]:
        """Return systemd's calendar events: two if days of the month or of the week may match."""
        times = CronSim(self.cron, datetime.now(UTC))
        clock = f"{_numbers(times.hours, 24)}:{_numbers(times.minutes, 60)}:00 {self.zone}"
        months, days = _numbers(times.months, 12), _numbers(times.days, 31)
        numbers = {day % 7 for day in times.weekdays if isinstance(day, int)}
        week_days = "" if len(numbers) == 7 else ",".join(_WEEK_DAYS[day] for day in sorted(numbers)) + " "
        dates = [f"{week_days}*-{months}-{days}"]
        if not times.day_and:
            dates = [f"*-{months}-{days}", f"{week_days}*-{months}-*"]
        return [f"{date} {clock}" for date in dates]


def parse_schedule(text: str) -> Schedule:
    """Read "0 3 * * 1", or with a time zone "0 3 * * 1 Europe/Berlin"; else it is that of this host.

    Raises UsageError.
    """
    *fields, zone = text.split() or [""]
    if len(fields) != 5:
        fields, zone = text.split(), host_zone()
    cron = " ".join(fields)
    try:
        if len(fields) != 5 or not all(map(_FIELD.fullmatch, fields)):
            raise CronSimError
        next(CronSim(cron, datetime.now(UTC)))
    except (CronSimError, StopIteration) as error:
        detail = f" ({error})" if str(error) else ""
        raise UsageError(
            f'"{shorten(text)}" is not a time{detail}: write a cron expression of five fields, as "0 3 * * 1" (Mondays '
            'at 03:00), with or without a time zone, as "0 3 * * 1 Europe/Berlin"'
        ) from None
    try:
        ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        known = zoneinfo.available_timezones()
        match = nearest(zone, known)
        hint = f"did you mean {match}?" if match else "write a name as Europe/Berlin"
        hint = hint if known else "install the package tzdata"
        raise UsageError(f'"{shorten(zone)}" is not a time zone: {hint}') from None
    return Schedule(cron, zone)


def resolve_slot(text: str, now: datetime | None = None) -> str:
    """Return the scheduled time that `--slot` names, as 2026-03-01T03:00:00Z, which sorts by time; "" for "".

    text: a time in ISO 8601 (without a zone it is local time), or a schedule, as "0 3 * * 1 Europe/Berlin": then its
    latest time. Raises UsageError.
    """
    if not text:
        return ""
    if re.match(r"\d{4}-", text):
        try:
            return slot_text(datetime.fromisoformat(text))
        except (ValueError, OverflowError):
            raise UsageError(
                f'--slot is "{shorten(text)}", which is not a time: write as 2026-03-01T03:00:00Z'
            ) from None
    try:
        schedule = parse_schedule(text)
    except UsageError as error:
        raise UsageError(f"--slot is neither a time nor a schedule: {error}") from None
    return slot_text(schedule.latest(now or datetime.now(UTC)))


def slot_text(time: datetime) -> str:
    """Return a time as 2026-03-01T03:00:00Z."""
    return time.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


@functools.cache
def host_zone() -> str:
    """Return the time zone of this host, in which its cron runs; UTC if the host does not say it."""
    try:
        linked = os.path.realpath("/etc/localtime")
        if linked.startswith(f"{_ZONE_FILES}/"):
            return os.path.relpath(linked, _ZONE_FILES)
        return Path("/etc/timezone").read_text(encoding="ascii").strip() or "UTC"
    except (OSError, ValueError):
        return "UTC"


def _numbers(numbers: set[int], count: int) -> str:
    return "*" if len(numbers) == count else ",".join(f"{number:02}" for number in sorted(numbers))
