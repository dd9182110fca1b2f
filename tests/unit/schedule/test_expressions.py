"""Times as people write them: the cron expression of each, and what is refused, with the reason."""

from __future__ import annotations

import pytest

from ddptrain.errors import UsageError
from ddptrain.schedule.expressions import to_cron, values


@pytest.mark.parametrize(
    ("text", "cron"),
    [
        ("03:00", "0 3 * * *"),
        ("3:05", "5 3 * * *"),
        ("at 03:00", "0 3 * * *"),
        ("daily", "0 0 * * *"),
        ("daily at 23:59", "59 23 * * *"),
        ("03:30,15:30", "30 3,15 * * *"),
        ("Mon 03:00", "0 3 * * 1"),
        ("MONDAY 03:00", "0 3 * * 1"),
        ("Thu,Mon 03:00", "0 3 * * 1,4"),
        ("Mon-Fri 03:00", "0 3 * * 1,2,3,4,5"),
        ("Sat-Mon 03:00", "0 3 * * 0,1,6"),
        ("weekdays 06:15", "15 6 * * 1-5"),
        ("weekends 06:15", "15 6 * * 0,6"),
        ("1st 04:30", "30 4 1 * *"),
        ("15th,1st 04:30", "30 4 1,15 * *"),
        ("hourly", "0 * * * *"),
        ("every 1m", "* * * * *"),
        ("every 15m", "*/15 * * * *"),
        ("every 15 minutes", "*/15 * * * *"),
        ("every 60m", "0 * * * *"),
        ("every 6h", "0 */6 * * *"),
        ("every 1 hour", "0 * * * *"),
        ("every 24h", "0 0 * * *"),
        ("0 3 * * 1", "0 3 * * 1"),
        ("  0  3 * *   1 ", "0 3 * * 1"),
        ("0 3 * * MON-FRI", "0 3 * * 1-5"),
        ("0 3 * jan,Mar sun", "0 3 * 1,3 0"),
        ("0 3 * * 7", "0 3 * * 0"),
        ("0 3 * * 5-7", "0 3 * * 0,5,6"),
        ("*/7 1-5/2 * * *", "*/7 1-5/2 * * *"),
        ("0 3 1 * 1", "0 3 1 * 1"),
        ("0 3 29 2 *", "0 3 29 2 *"),
    ],
)
def test_time_becomes_a_cron_expression(text: str, cron: str) -> None:
    assert to_cron(text) == cron


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is empty"),
        ("Mon", "which is not a time"),
        ("tomorrow 03:00 sharp", "which is not a time"),
        ("25:00", "25:00 is not a time of the day"),
        ("03:60", "03:60 is not a time of the day"),
        ("03:00,04:30", "different minutes"),
        ("Foo 03:00", '"foo" contains no days'),
        ("0th 03:00", "not days of a month"),
        ("32nd 03:00", "not days of a month"),
        ("every 7m", "is not regular: 1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60"),
        ("every 0h", "is not regular"),
        ("60 3 * * *", "60 is not a valid minute: it must be within 0 and 59"),
        ("0 24 * * *", "24 is not a valid hour"),
        ("0 3 0 * *", "0 is not a valid day of the month"),
        ("0 3 * 13 *", "13 is not a valid month"),
        ("0 3 * * 8", "8 is not a valid day of the week"),
        ("0 3 * * L", "not a valid day of the week in a cron expression"),
        ("0 3 * * 1#2", "not a valid day of the week in a cron expression"),
        ("0 3 5-1 * *", "5-1 is not a valid day of the month"),
        ("*/0 3 * * *", "*/0 is not a valid minute"),
        ("5/15 3 * * *", "write 5-59/15"),
        ("0 3 */2 * 1", "different times to different schedulers"),
        ("0 3 31 2,4 *", "no month among 2,4 has a day 31"),
        ("@daily", "which is not a time"),
        ("0 0 3 * * 1", "which is not a time"),
    ],
)
def test_wrong_time_is_refused_with_the_reason(text: str, part: str) -> None:
    with pytest.raises(UsageError) as refused:
        to_cron(text)
    assert part in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("field", "position", "numbers"),
    [
        ("*/20", 0, {0, 20, 40}),
        ("1-5/2", 1, {1, 3, 5}),
        ("*", 4, {0, 1, 2, 3, 4, 5, 6}),
        ("1,15", 2, {1, 15}),
    ],
)
def test_numbers_of_a_field(field: str, position: int, numbers: set[int]) -> None:
    assert set(values(field, position)) == numbers
