"""Times of a schedule."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta

import pytest

from ddptrain.errors import UsageError
from ddptrain.schedule.entries import parse_schedule, resolve_slot, slot_text

# --- The times of schedules, also where clocks change, and systemd's form of them ---


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "now", "latest", "following"),
    [
        # A time is its own latest time, to the second.
        ("0 3 * * * UTC", "2026-11-22T03:00:00", "2026-11-22T03:00", "2026-11-23T03:00"),
        ("0 3 * * * UTC", "2026-11-22T02:59:59.999", "2026-11-21T03:00", "2026-11-22T03:00"),
        ("0 3 * * * UTC", "2026-11-22T03:00:00.5", "2026-11-22T03:00", "2026-11-23T03:00"),
        # Monday in Berlin begins on Sunday in UTC.
        ("30 0 * * mon Europe/Berlin", "2026-11-22T23:30", "2026-11-22T23:30", "2026-11-29T23:30"),
        # Clocks go forward: 02:30 does not exist, and is replaced by 03:00.
        ("30 2 * * * Europe/Berlin", "2027-03-28T00:59", "2027-03-27T01:30", "2027-03-28T01:00"),
        # Clocks go back: 02:30 exists twice, and the first one counts.
        ("30 2 * * * Europe/Berlin", "2026-10-25T02:10", "2026-10-25T00:30", "2026-10-26T01:30"),
        # Days of the month or of the week, if both are given; months without that day; leap days.
        ("0 3 1 * 1 UTC", "2026-12-01T04:00", "2026-12-01T03:00", "2026-12-07T03:00"),
        ("30 4 31 * * UTC", "2027-04-15T00:00", "2027-03-31T04:30", "2027-05-31T04:30"),
        ("0 0 29 2 * UTC", "2026-11-22T00:00", "2024-02-29T00:00", "2028-02-29T00:00"),
    ],
)
def test_latest_and_next_time(text: str, now: str, latest: str, following: str) -> None:
    schedule = parse_schedule(text)
    assert schedule.latest(utc(now)) == utc(latest)
    assert schedule.next(utc(now)) == utc(following)
    assert parse_schedule(str(schedule)) == schedule


@pytest.mark.parametrize(
    "text",
    [
        *("", "soon", "03:00", "Mon 03:00", "0 3 * *", "0 3 * * 1 2 Europe/Berlin", "60 3 * * *", "0 3 31 2 *"),
        # What cron and systemd read differently, or not at all.
        *("5/15 * * * *", "0 3 L * *", "0 3 * * 1#2", "@daily", "0 0 3 * * *", "0 3 * * *\n0"),
        *("0 3 * * 1 Europe/Berlln", "0 3 * * 1 ../../etc/passwd", "0 3 * * 1 /etc/localtime"),
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a time"):
        parse_schedule(text)


@pytest.mark.parametrize(
    ("text", "slot"),
    [
        ("", ""),
        ("2026-03-01T03:00:00Z", "2026-03-01T03:00:00Z"),
        ("2026-03-01T03:00+01:00", "2026-03-01T02:00:00Z"),
        ("0 3 * * 1 Europe/Berlin", "2026-11-16T02:00:00Z"),
        ("*/15 * * * * UTC", "2026-11-22T12:00:00Z"),
    ],
)
def test_slot_is_a_time_or_the_latest_time_of_a_schedule(text: str, slot: str) -> None:
    assert resolve_slot(text, utc("2026-11-22T12:07:31.5")) == slot


@pytest.mark.parametrize("text", ["2026-13-01T03:00Z", "yesterday", "99 3 * * *"])
def test_wrong_slot_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--slot is"):
        resolve_slot(text)


def test_slots_sort_by_time() -> None:
    slots = [slot_text(utc("2026-09-30T23:59") + timedelta(hours=step * 37)) for step in range(200)]
    assert slots == sorted(slots)


@pytest.mark.parametrize(
    ("cron", "events"),
    [
        ("* * * * *", ["*-*-* *:*:00 UTC"]),
        ("*/30 0-2 * * *", ["*-*-* 00,01,02:00,30:00 UTC"]),
        ("0 3 * * 1,4", ["Mon,Thu *-*-* 03:00:00 UTC"]),
        ("0 3 * * 5-7", ["Sun,Fri,Sat *-*-* 03:00:00 UTC"]),
        ("30 4 1,15 feb *", ["*-02-01,15 04:30:00 UTC"]),
        ("0 3 1 * 0", ["*-*-01 03:00:00 UTC", "Sun *-*-* 03:00:00 UTC"]),
    ],
)
def test_events_of_systemd(cron: str, events: list[str]) -> None:
    assert parse_schedule(f"{cron} UTC").on_calendar() == events


TIMES = ("0 3 * * *", "0 3 * * Mon,Thu", "30 4 1 * *", "*/15 * * * *", "0 3 1 * 1", "*/20 1-5/2 * 2,8 *")


@pytest.mark.parametrize("at", TIMES)
def test_systemd_finds_the_same_next_time(at: str) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd is not installed")
    now = datetime(2026, 11, 22, 12, 7, 31, tzinfo=UTC)
    schedule = parse_schedule(f"{at} Europe/Berlin")
    events = schedule.on_calendar()
    command = [analyze, "calendar", f"--base-time={now:%Y-%m-%d %H:%M:%S} UTC", *events]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "TZ": "UTC"})
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(?:Next elapse|\(in UTC\)): \w+ (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) UTC", done.stdout)
    assert len(found) == len(events), done.stdout
    assert min(datetime.fromisoformat(f"{each}+00:00") for each in found) == schedule.next(now)
