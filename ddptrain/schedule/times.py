"""The times of a schedule: a cron expression and a time zone."""

from __future__ import annotations

import functools
import os
import re
import zoneinfo
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from ddptrain.config.wording import nearest, shorten
from ddptrain.errors import UsageError

_ZONE_FILES = "/usr/share/zoneinfo"
# What cron and systemd understand alike; cronsim also knows 5/15, L, # and seconds.
_TERM = r"(?:\*|(?:\d+|[A-Za-z]{3})-(?:\d+|[A-Za-z]{3}))(?:/\d+)?|\d+|[A-Za-z]{3}"
_FIELD = re.compile(rf"(?:{_TERM})(?:,(?:{_TERM}))*")
_WEEK_DAYS = ("Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat")


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
