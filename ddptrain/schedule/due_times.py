"""The times of a schedule: the latest and the next one, in a time zone with daylight saving time. Pure functions."""

from __future__ import annotations

import functools
import itertools
import os
import zoneinfo
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from zoneinfo import ZoneInfo

from cronsim import CronSim

from ddptrain.config.wording import nearest, shorten
from ddptrain.errors import UsageError
from ddptrain.schedule.expressions import to_cron

_ZONE_FILES = Path("/usr/share/zoneinfo")
_SECOND = timedelta(seconds=1)
_LOOK_AHEAD = timedelta(days=400)  # every change of the clocks of a year


@dataclass(frozen=True, slots=True)
class Schedule:
    """When something runs. Times are in UTC.

    text: as the user wrote it. cron: the same as a cron expression. zone: the name of a time zone.

    A time that does not exist, because the clocks go forward, is replaced by the first time after the change. A time
    that exists twice is the first one. Intervals (a minute or hour that begins with *) follow the clock on the wall.
    """

    text: str
    cron: str
    zone: str

    def __str__(self) -> str:
        return f"{self.text} {self.zone}"

    def latest(self, now: datetime) -> datetime:
        """Return the latest scheduled time that is not after `now`."""
        found = _utc(next(CronSim(self.cron, self._local(now.replace(microsecond=0) + _SECOND), reverse=True)))
        for later in self._from(found):  # backwards, cronsim is wrong in the hour that exists twice
            if later > now:
                break
            found = later
        return found

    def next(self, now: datetime) -> datetime:
        """Return the first scheduled time after `now`."""
        return next(later for later in self._from(self.latest(now)) if later > now)

    def between(self, start: datetime, end: datetime) -> Iterator[datetime]:
        """Yield the scheduled times after `start`, up to and including `end`."""
        for time in self._from(self.latest(start)):
            if time > end:
                return
            if time > start:
                yield time

    def shortest_interval(self, now: datetime) -> timedelta:
        """Return the shortest time between two of its next times."""
        start = self.latest(now)
        times = [start, *itertools.islice(self._from(start), 100)]
        return min(later - earlier for earlier, later in itertools.pairwise(times))

    def missing_times(self, now: datetime) -> list[str]:
        """Return the next times that do not exist on the clock, as "2027-03-28 02:30", for a year."""
        return [f"{time:%Y-%m-%d %H:%M}" for time in self._wall_times(now) if time != _utc(time).astimezone(self._zone)]

    def _wall_times(self, now: datetime) -> Iterator[datetime]:
        """Yield the next times on the clock of fixed times, also those that do not exist."""
        if self._is_interval:
            return
        for time in CronSim(self.cron, now.astimezone(self._zone).replace(tzinfo=None)):
            if time.replace(tzinfo=UTC) > now + _LOOK_AHEAD:
                return
            yield time.replace(tzinfo=self._zone)

    def _from(self, start: datetime) -> Iterator[datetime]:
        fixed = map(_utc, CronSim(self.cron, self._local(start)))
        before = start
        for time in self._interval_times(start) if self._is_interval else fixed:
            if time > before:  # a time that does not exist may be replaced by another scheduled time
                yield time
            before = time

    def _interval_times(self, start: datetime) -> Iterator[datetime]:
        """Yield the times after `start` of an interval: those of clocks that never change, each until the next change.

        cronsim adds whole hours and minutes to the local time, but on Lord Howe Island clocks change by half an hour.
        """
        while True:
            offset = self._offset(start + _SECOND)
            for time in map(_utc, CronSim(self.cron, start.astimezone(timezone(offset)))):
                if self._offset(time) != offset:
                    break
                yield time
                start = time
            else:
                return
            start = self._last_second(start + _SECOND, time)

    def _last_second(self, start: datetime, end: datetime) -> datetime:
        """Return the last second before the clocks change, between two times."""
        offset, seconds = self._offset(start), range((end - start) // _SECOND)
        change = bisect(seconds, 0, key=lambda at: self._offset(start + at * _SECOND) != offset)
        return start + (change - 1) * _SECOND

    def _offset(self, time: datetime) -> timedelta:
        return self._local(time).utcoffset() or timedelta()

    @property
    def _is_interval(self) -> bool:
        minute, hour, *_ = self.cron.split()
        return minute.startswith("*") or hour.startswith("*")

    def _local(self, time: datetime) -> datetime:
        return time.astimezone(self._zone)

    @property
    def _zone(self) -> ZoneInfo:
        return ZoneInfo(self.zone)


def parse_schedule(text: str, zone: str = "UTC") -> Schedule:
    """Read a time such as "Mon 03:00" or a cron expression. Raises UsageError, also for a time zone that is unknown."""
    try:
        ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        known = zoneinfo.available_timezones()
        match = nearest(zone, known)
        hint = f"did you mean {match}?" if match else "write a name as Europe/Berlin"
        hint = hint if known else "install the package tzdata"
        raise UsageError(f'--timezone: "{shorten(zone)}" is not a time zone: {hint}') from None
    cron = to_cron(text)
    return Schedule(" ".join(text.split()), cron, zone)


def resolve_slot(text: str, now: datetime | None = None) -> str:
    """Return the scheduled time that `--slot` names, as 2026-03-01T03:00:00Z, which sorts by time; "" for "".

    text: a time in ISO 8601 (without a zone it is local time), or a schedule with a time zone, as "Mon 03:00
    Europe/Berlin" or "0 3 * * 1" (UTC): then its latest time. Raises UsageError.
    """
    if not text:
        return ""
    if text[:4].isdecimal() and text[4:5] == "-":
        try:
            return slot_text(datetime.fromisoformat(text))
        except (ValueError, OverflowError):
            raise UsageError(
                f'--slot is "{shorten(text)}", which is not a time: write as 2026-03-01T03:00:00Z'
            ) from None
    try:
        schedule = parse_schedule(*split_zone(text))
    except UsageError as error:
        raise UsageError(f'--slot is "{shorten(text)}", neither a time nor a schedule: {error}') from None
    return slot_text(schedule.latest(now or datetime.now(UTC)))


def split_zone(text: str) -> tuple[str, str]:
    """Split "Mon 03:00 Europe/Berlin" into time and time zone; UTC if the last word is no zone."""
    time, _, last = text.strip().rpartition(" ")
    is_zone = last == "UTC" or ("/" in last and last[0].isalpha())
    return (time, last) if time and is_zone else (text, "UTC")


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


def same_zone(one: str, other: str, now: datetime) -> bool:
    """Return whether two zones have the same time on every day from now on, for a year."""
    days = [now + timedelta(days=day) for day in range(_LOOK_AHEAD.days)]
    zones = ZoneInfo(one), ZoneInfo(other)
    return all(
        zones[0].utcoffset(day.replace(tzinfo=None)) == zones[1].utcoffset(day.replace(tzinfo=None)) for day in days
    )


def _utc(time: datetime) -> datetime:
    return time.astimezone(UTC)
