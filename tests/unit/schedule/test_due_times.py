"""The times of schedules: the latest and the next one where clocks change, months end and leap days come."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from ddptrain.errors import UsageError
from ddptrain.schedule import due_times
from ddptrain.schedule.due_times import Schedule, parse_schedule, resolve_slot, same_zone, slot_text, split_zone
from ddptrain.schedule.expressions import values

BERLIN = "Europe/Berlin"


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "zone", "now", "latest", "following"),
    [
        # A time is its own latest time, to the second.
        ("03:00", "UTC", "2026-11-22T03:00:00", "2026-11-22T03:00", "2026-11-23T03:00"),
        ("03:00", "UTC", "2026-11-22T02:59:59.999", "2026-11-21T03:00", "2026-11-22T03:00"),
        ("03:00", "UTC", "2026-11-22T03:00:00.5", "2026-11-22T03:00", "2026-11-23T03:00"),
        ("every 1m", "UTC", "2026-11-22T03:00:30", "2026-11-22T03:00", "2026-11-22T03:01"),
        # Time zones: Monday in Berlin begins on Sunday in UTC.
        ("Mon 00:30", BERLIN, "2026-11-22T23:30", "2026-11-22T23:30", "2026-11-29T23:30"),
        ("Mon 03:00", "Asia/Kolkata", "2026-11-22T12:00", "2026-11-15T21:30", "2026-11-22T21:30"),
        # Clocks go forward on 2027-03-28 at 02:00 in Berlin: 02:30 does not exist, and is replaced by 03:00.
        ("02:30", BERLIN, "2027-03-28T00:59", "2027-03-27T01:30", "2027-03-28T01:00"),
        ("02:30", BERLIN, "2027-03-28T01:00", "2027-03-28T01:00", "2027-03-29T00:30"),
        ("03:00", BERLIN, "2027-03-28T12:00", "2027-03-28T01:00", "2027-03-29T01:00"),
        ("every 15m", BERLIN, "2027-03-28T00:50", "2027-03-28T00:45", "2027-03-28T01:00"),
        # Clocks go back on 2026-10-25 at 03:00 in Berlin: 02:30 exists twice, and the first one counts.
        ("02:30", BERLIN, "2026-10-25T00:29", "2026-10-24T00:30", "2026-10-25T00:30"),
        ("02:30", BERLIN, "2026-10-25T01:10", "2026-10-25T00:30", "2026-10-26T01:30"),
        ("02:30", BERLIN, "2026-10-25T01:30", "2026-10-25T00:30", "2026-10-26T01:30"),
        ("03:00", BERLIN, "2026-10-25T01:59", "2026-10-24T01:00", "2026-10-25T02:00"),
        # Intervals follow the clock: the hour that exists twice has both times.
        ("every 30m", BERLIN, "2026-10-25T01:10", "2026-10-25T01:00", "2026-10-25T01:30"),
        ("hourly", BERLIN, "2026-10-25T00:30", "2026-10-25T00:00", "2026-10-25T01:00"),
        # Clocks change at midnight in Havana.
        ("00:00", "America/Havana", "2027-03-14T12:00", "2027-03-14T05:00", "2027-03-15T04:00"),
        # Months without that day, and leap days.
        ("31st 04:30", "UTC", "2027-04-15T00:00", "2027-03-31T04:30", "2027-05-31T04:30"),
        ("1st 00:00", BERLIN, "2026-11-30T23:00", "2026-11-30T23:00", "2026-12-31T23:00"),
        ("0 0 29 2 *", "UTC", "2026-11-22T00:00", "2024-02-29T00:00", "2028-02-29T00:00"),
        # Days of the month or of the week, if both are given.
        ("0 3 1 * 1", "UTC", "2026-11-22T00:00", "2026-11-16T03:00", "2026-11-23T03:00"),
        ("0 3 1 * 1", "UTC", "2026-12-01T04:00", "2026-12-01T03:00", "2026-12-07T03:00"),
    ],
)
def test_latest_and_next_time(text: str, zone: str, now: str, latest: str, following: str) -> None:
    schedule = parse_schedule(text, zone)
    assert schedule.latest(utc(now)) == utc(latest)
    assert schedule.next(utc(now)) == utc(following)


def by_hand(schedule: Schedule, start: datetime, end: datetime) -> list[datetime]:
    """The times found by a look at every minute, with the rules of Debian's cron for changes of the clock."""
    fields = schedule.cron.split()
    minutes, hours, month_days, months, week_days = (values(field, at) for at, field in enumerate(fields))
    is_fixed = not fields[0].startswith("*") and not fields[1].startswith("*")
    minute = timedelta(minutes=1)

    def matches(wall: datetime) -> bool:
        days = (wall.day in month_days, wall.isoweekday() % 7 in week_days)
        on_day = all(days) if "*" in (fields[2], fields[4]) else any(days)
        return on_day and wall.month in months and wall.hour in hours and wall.minute in minutes

    found, time = set(), start
    before = (start - minute).astimezone(ZoneInfo(schedule.zone)).replace(tzinfo=None)
    while time <= end:
        local = time.astimezone(ZoneInfo(schedule.zone))
        wall = local.replace(tzinfo=None)
        skipped = [before + minute * step for step in range(1, (wall - before) // minute)] if is_fixed else []
        if (matches(wall) and not (is_fixed and local.fold)) or any(map(matches, skipped)):
            found.add(time)
        before, time = wall, time + minute
    return sorted(found)


@pytest.mark.parametrize(
    "zone_and_day",
    [
        (BERLIN, "2026-10-24"),
        (BERLIN, "2027-03-27"),
        ("America/Havana", "2026-10-31"),
        ("Asia/Beirut", "2027-03-27"),
        ("Australia/Lord_Howe", "2026-04-03"),  # the clocks change by half an hour
        ("Australia/Lord_Howe", "2026-10-02"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    "cron",
    [
        *("30 2 * * *", "30 0,1,2,3 * * *", "0 2,3 * * *", "*/20 2 * * *", "0 */2 * * *"),
        *("45 * * * *", "15 */2 * * *", "*/15 2,3 * * *", "*/15 3 * * *", "* 0,1 * * *"),
    ],
)
def test_times_are_those_of_a_look_at_every_minute(cron: str, zone_and_day: tuple[str, str]) -> None:
    zone, day = zone_and_day
    schedule, start = parse_schedule(cron, zone), utc(day)
    end = start + timedelta(days=2)
    expected = by_hand(schedule, start - timedelta(days=1), end)
    assert list(schedule.between(start, end)) == [time for time in expected if time > start]
    for step in range(0, 48 * 60, 37):
        now = start + timedelta(minutes=step)
        assert schedule.latest(now) == max(time for time in expected if time <= now)


def test_between_excludes_the_start_and_includes_the_end() -> None:
    found = parse_schedule("03:00").between(utc("2026-11-20T03:00"), utc("2026-11-22T03:00"))
    assert list(found) == [utc("2026-11-21T03:00"), utc("2026-11-22T03:00")]
    assert list(parse_schedule("03:00").between(utc("2026-11-20T03:00"), utc("2026-11-20T04:00"))) == []


@pytest.mark.parametrize(
    ("text", "hours"),
    [("every 15m", 0.25), ("03:00", 24), ("Mon,Tue 03:00", 24), ("Mon 03:00", 168), ("1st 00:00", 672)],
)
def test_shortest_interval(text: str, hours: float) -> None:
    assert parse_schedule(text).shortest_interval(utc("2026-11-22")) == timedelta(hours=hours)


def test_times_increase_where_one_is_replaced_by_another() -> None:
    schedule = parse_schedule("0 2,3 * * *", BERLIN)
    found = list(schedule.between(utc("2027-03-27"), utc("2027-03-30")))
    assert all(earlier < later for earlier, later in pairwise(found))
    assert list(islice(found, 2, 4)) == [utc("2027-03-28T01:00"), utc("2027-03-29T00:00")]


@pytest.mark.parametrize(
    ("text", "missing"),
    [("02:30", ["2027-03-28 02:30"]), ("Mon 02:30", []), ("03:00", []), ("every 15m", [])],
)
def test_times_that_do_not_exist_are_known(text: str, missing: list[str]) -> None:
    assert parse_schedule(text, BERLIN).missing_times(utc("2026-11-22")) == missing


@pytest.mark.parametrize(
    ("text", "slot"),
    [
        ("", ""),
        ("2026-03-01T03:00:00Z", "2026-03-01T03:00:00Z"),
        ("2026-03-01T03:00+01:00", "2026-03-01T02:00:00Z"),
        ("Mon 03:00 Europe/Berlin", "2026-11-16T02:00:00Z"),
        ("Mon 03:00", "2026-11-16T03:00:00Z"),
        ("0 3 * * 1 Europe/Berlin", "2026-11-16T02:00:00Z"),
        ("0 3 * * 1", "2026-11-16T03:00:00Z"),
        ("every 15m UTC", "2026-11-22T12:00:00Z"),
        ("hourly America/Argentina/Buenos_Aires", "2026-11-22T12:00:00Z"),
    ],
)
def test_slot_is_a_time_or_the_latest_time_of_a_schedule(text: str, slot: str) -> None:
    assert resolve_slot(text, utc("2026-11-22T12:07:31.5")) == slot


@pytest.mark.parametrize("text", ["2026-13-01T03:00Z", "yesterday", "Mon 03:00 Europe/Berlln", "99 3 * * *"])
def test_wrong_slot_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--slot is"):
        resolve_slot(text)


def test_slots_sort_by_time() -> None:
    start = datetime(2026, 9, 30, 23, 59, tzinfo=UTC)
    slots = [slot_text(start + timedelta(hours=step * 37)) for step in range(200)]
    assert slots == sorted(slots)


@pytest.mark.parametrize("schedule", ["Mon 03:00", "*/5 * * * *", "1st,15th 04:30"])
def test_text_of_a_schedule_is_read_back(schedule: str) -> None:
    made = parse_schedule(schedule, BERLIN)
    assert parse_schedule(*split_zone(str(made))) == made


def test_unknown_zone_is_refused_with_a_hint() -> None:
    with pytest.raises(UsageError, match=r'"Europe/Berlln" is not a time zone: did you mean Europe/Berlin\?'):
        parse_schedule("03:00", "Europe/Berlln")


@pytest.mark.parametrize("zone", ["../../etc/passwd", "/etc/localtime", "", "a\0b"])
def test_zone_is_not_a_path(zone: str) -> None:
    with pytest.raises(UsageError, match="is not a time zone"):
        parse_schedule("03:00", zone)


def test_zones_are_compared_by_their_times() -> None:
    now = utc("2026-11-22")
    assert same_zone("UTC", "Etc/UTC", now)
    assert same_zone(BERLIN, "Europe/Paris", now)
    assert not same_zone("UTC", "Europe/London", now)


def test_zone_of_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    due_times.host_zone.cache_clear()
    monkeypatch.setattr(os.path, "realpath", lambda _: "/usr/share/zoneinfo/Europe/Berlin")
    assert due_times.host_zone() == BERLIN
    due_times.host_zone.cache_clear()
