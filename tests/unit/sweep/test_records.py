"""What is accepted as sweep.json: another user may have written it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddptrain.errors import UsageError
from ddptrain.sweep.records import SweepRecord, TrialRecord, TrialState, parse_sweep, read_sweep

RECORD = SweepRecord(
    "s-1", "s", "s.yaml", "2026-01-01T00:00:00Z", trials=[TrialRecord(0, {"lr": 0.1}, TrialState.PRUNED, value=None)]
)


def test_record_is_read_as_it_was_saved(tmp_path: Path) -> None:
    RECORD.save(tmp_path)
    assert read_sweep(tmp_path) == RECORD


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"name": ["x"]}, "name: Input should be a valid string"),
        ({"status": 1.5}, "status: Input should be a valid string"),
        ({"trials": [{"number": 0, "params": {}, "state": "gone"}]}, "trials.0.state: Input should be 'running'"),
        ({"trials": [{"number": 0, "params": {}, "error": {}}]}, "trials.0.error: Input should be a valid string"),
        ({"trials": 7}, "trials: Input should be a valid list"),
        ({"format": 2}, "format 2 is not known"),
    ],
)
def test_field_of_another_type_is_named(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    RECORD.save(tmp_path)
    raw = json.loads((tmp_path / "sweep.json").read_bytes())
    with pytest.raises(UsageError, match=why):
        parse_sweep(json.dumps(raw | changes).encode(), "sweep.json")
