"""Converts times such as "Mon 03:00", and cron expressions, to cron expressions that all schedulers accept."""

from __future__ import annotations

import re

from ddptrain.config.wording import shorten
from ddptrain.errors import UsageError

EXAMPLES = (
    '"03:00", "Mon 03:00", "Mon,Thu 03:00", "1st 04:30", "every 15m", hourly, or a cron expression as "0 3 * * 1"'
)

_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_DAY_NAMES = ("sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_TIME = re.compile(r"(\d{1,2}):(\d{2})")
_EVERY = re.compile(r"every (\d+) ?(m|min|minutes?|h|hours?)")
_ORDINAL = re.compile(r"(\d{1,2})(st|nd|rd|th)")
_PART = re.compile(r"(?:\*|(\d{1,2})(?:-(\d{1,2}))?)(?:/(\d{1,2}))?")
_FIELDS = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of the month", 1, 31, ()),
    ("month", 1, 12, _MONTHS),
    ("day of the week", 0, 7, _DAYS),
)
_LONGEST_MONTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def to_cron(text: str) -> str:
    """Convert a text such as "Mon 03:00" to a cron expression of five fields, without names and without day 7.

    Raises UsageError.
    """
    words = text.lower().replace(" at ", " ").split()
    words = words[1:] if words[:1] == ["at"] else words
    given = " ".join(words)
    if not words:
        raise UsageError(f"--at is empty: write {EXAMPLES}")
    if len(words) == len(_FIELDS) and not _is_time(words[-1]):
        return _from_cron(words)
    if given == "hourly":
        return "0 * * * *"
    if every := _EVERY.fullmatch(given):
        return _from_interval(int(every[1]), every[2][0])
    if given == "daily":
        return "0 0 * * *"
    days, times = words[:-1], words[-1]
    if len(days) <= 1 and _is_time(times):
        minute, hours = _from_times(times)
        month_days, week_days = _from_days(days[0] if days else "daily")
        return f"{minute} {hours} {month_days} * {week_days}"
    raise UsageError(f'--at is "{shorten(text)}", which is not a time: write {EXAMPLES}')


def _is_time(word: str) -> bool:
    return all(_TIME.fullmatch(part) for part in word.split(","))


def _from_times(word: str) -> tuple[str, str]:
    """Convert "03:00" or "03:00,15:00" to the fields of minute and hour."""
    times = [(int(match[1]), int(match[2])) for match in map(_TIME.fullmatch, word.split(",")) if match]
    for hour, minute in times:
        if hour > 23 or minute > 59:
            raise UsageError(f"--at: {hour:02}:{minute:02} is not a time of the day: write 00:00 to 23:59")
    minutes = {minute for _, minute in times}
    if len(minutes) > 1:
        raise UsageError(f"--at: the times {word} have different minutes, which one schedule can't have: add two")
    return str(minutes.pop()), ",".join(str(hour) for hour in sorted({hour for hour, _ in times}))


def _from_days(word: str) -> tuple[str, str]:
    """Convert "daily", "mon-fri", "mon,thu", "1st" or "1st,15th" to the fields of the days of month and week."""
    if word == "daily":
        return "*", "*"
    if word == "weekdays":
        return "*", "1-5"
    if word == "weekends":
        return "*", "0,6"
    parts = word.split(",")
    ordinals = [_ORDINAL.fullmatch(part) for part in parts]
    if any(ordinals):
        numbers = [int(match[1]) if match else 0 for match in ordinals]
        if not all(1 <= number <= 31 for number in numbers):
            raise UsageError(f'--at: "{shorten(word)}" are not days of a month: write 1st to 31st, as "1st,15th 04:30"')
        return ",".join(str(number) for number in sorted(set(numbers))), "*"
    days: set[int] = set()
    for part in parts:
        first, dash, last = part.partition("-")
        start, end = _week_day(first, word), _week_day(last if dash else first, word)
        days |= {(start + more) % 7 for more in range((end - start) % 7 + 1)}
    return "*", ",".join(str(day) for day in sorted(days))


def _week_day(word: str, given: str) -> int:
    for number, (short, name) in enumerate(zip(_DAYS, _DAY_NAMES, strict=True)):
        if word in (short, name) or (len(word) > 3 and name.startswith(word)):
            return number
    raise UsageError(
        f'--at: "{shorten(given)}" contains no days: write days of the week as "Mon,Thu 03:00", or of the month as '
        '"1st 04:30"'
    )


def _from_interval(number: int, unit: str) -> str:
    """Convert "every 15m" or "every 6h". The interval must divide the hour or the day, as cron requires."""
    whole, noun = (60, "minutes") if unit == "m" else (24, "hours")
    if not 1 <= number <= whole or whole % number:
        fits = ", ".join(str(each) for each in range(1, whole + 1) if whole % each == 0)
        raise UsageError(f"--at: every {number} {noun} is not regular: {fits} are possible")
    step = "*" if number == 1 else "0" if number == whole else f"*/{number}"
    return f"{step} * * * *" if unit == "m" else f"0 {step} * * *"


def _from_cron(fields: list[str]) -> str:
    """Check a cron expression, and write it so that cron, Kubernetes, GitHub and GitLab read it alike."""
    for position, field in enumerate(fields):
        values(field, position)
    minute, hour, month_day, month, week_day = fields
    month = _without_names(month, 3)
    week_day = _without_names(week_day, 4)
    if re.search(r"(?<!/)\b7", week_day):
        week_day = ",".join(str(day) for day in sorted({day % 7 for day in values(week_day, 4)}))
    both = [field for field in (month_day, week_day) if field != "*"]
    if len(both) == 2 and any(field.startswith("*") for field in both):
        raise UsageError(
            f"--at: {month_day} as day of the month with {week_day} as day of the week means different times to "
            "different schedulers: write * for one of them"
        )
    days = values(month_day, 2)
    if week_day == "*" and min(days) > max(_LONGEST_MONTHS[number - 1] for number in values(month, 3)):
        raise UsageError(f"--at: no month among {month} has a day {min(days)}")
    return f"{minute} {hour} {month_day} {month} {week_day}"


def _without_names(field: str, position: int) -> str:
    """Return a field with numbers in place of names: Debian's cron takes no lists or ranges of names."""
    names, first = _FIELDS[position][3], _FIELDS[position][1]
    return re.sub(r"[a-z]+", lambda match: str(names.index(match[0]) + first), field)


def values(field: str, position: int) -> list[int]:
    """Return the numbers of a field, sorted; position: 0 is the minute, 4 the day of the week. Raises UsageError."""
    noun, low, high, names = _FIELDS[position]
    if any(word not in names for word in re.findall(r"[a-z]+", field)):
        known = f"a number from {low} to {high}" + (f", or {names[0]} to {names[-1]}" if names else "")
        raise UsageError(f'--at: "{shorten(field)}" is not a valid {noun} in a cron expression: write {known}, or *')
    found: set[int] = set()
    for part in _without_names(field, position).split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise UsageError(
                f'--at: "{shorten(field)}" is not a valid {noun} in a cron expression: write as 5, 1-5, */15 or *'
            )
        start, end, step = match[1], match[2], match[3]
        if start and step and not end:
            raise UsageError(f"--at: {part} is read in different ways by schedulers: write {start}-{high}/{step}")
        first = int(start) if start else low
        last = int(end or start) if start else (6 if position == 4 else high)
        if not low <= first <= last <= high or (step and int(step) < 1):
            raise UsageError(f"--at: {part} is not a valid {noun}: it must be within {low} and {high}")
        found |= set(range(first, last + 1, int(step or 1)))
    return sorted(found)
