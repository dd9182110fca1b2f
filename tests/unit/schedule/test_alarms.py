"""Which problems `schedule check --quiet` prints, at which times."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ddptrain.schedule.alarms import new_alarms
from ddptrain.schedule.entries import Entries

START = datetime(2026, 3, 28, 12, tzinfo=UTC)
SILENT = "pets: message not delivered to json://10.0.0.5: the server does not answer"


def told(entries: Entries, minutes: range, lines: dict[str, str], *, save: bool = True) -> dict[int, list[str]]:
    """Minute -> what the check of that minute prints, without the minutes of silence."""
    each = {at: new_alarms(entries, lines, START + timedelta(minutes=at), save=save) for at in minutes}
    return {at: found for at, found in each.items() if found}


def test_problem_is_told_once_a_day_and_once_when_it_is_over(tmp_path: Path) -> None:
    entries = Entries(tmp_path)
    assert told(entries, range(0, 3000, 10), {"pets": SILENT}) == {0: [SILENT], 1440: [SILENT], 2880: [SILENT]}
    assert told(entries, range(3000, 3010), {"pets": ""}) == {3000: [f"solved: {SILENT}"]}
    assert told(entries, range(3010, 3012), {"pets": SILENT}) == {3010: [SILENT]}


def test_another_cause_of_the_same_problem_is_no_new_problem(tmp_path: Path) -> None:
    entries = Entries(tmp_path)
    assert told(entries, range(1), {"pets": SILENT}) == {0: [SILENT]}
    assert told(entries, range(1, 9), {"pets": "pets: the store does not answer"}) == {}
    assert told(entries, range(9, 12), {"pets": ""}) == {9: ["solved: pets: the store does not answer"]}


def test_what_was_not_checked_is_not_solved(tmp_path: Path) -> None:
    entries = Entries(tmp_path)
    told(entries, range(1), {"pets": SILENT})
    assert told(entries, range(1, 3), {"dogs": ""}) == {}
    assert told(entries, range(3, 4), {"pets": SILENT}) == {}


def test_second_check_at_a_time_changes_nothing(tmp_path: Path) -> None:
    entries = Entries(tmp_path)
    assert told(entries, range(2), {"pets": SILENT}, save=False) == {0: [SILENT], 1: [SILENT]}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", [b"", b"[]", b'{"pets": 1}', b'{"pets": ["x", "y", "z"]}', b"\xff"])
def test_damaged_file_costs_one_message(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "alarms").write_bytes(data)
    assert told(Entries(tmp_path), range(3), {"pets": SILENT}) == {0: [SILENT]}


def test_clock_that_was_set_back_does_not_silence_it(tmp_path: Path) -> None:
    entries = Entries(tmp_path)
    assert told(entries, range(100_000, 100_001), {"pets": SILENT}) == {100_000: [SILENT]}
    assert told(entries, range(2), {"pets": SILENT}) == {0: [SILENT]}


def test_folder_that_cannot_be_written_silences_nothing(tmp_path: Path) -> None:
    (tmp_path / "alarms").mkdir()
    assert told(Entries(tmp_path), range(2), {"pets": SILENT}) == {0: [SILENT], 1: [SILENT]}
