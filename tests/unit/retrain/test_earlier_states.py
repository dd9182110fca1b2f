"""The states that users know of, from the earlier retrainings and the alarms of `ddptrain schedule check`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.notify.messages import events_to_tell
from ddptrain.retrain import records as records_module
from ddptrain.retrain.finish import _earlier_states
from ddptrain.retrain.records import RetrainRecord, RetrainRecords
from ddptrain.retrain.start import Start

ON = ["failed", "rejected", "recovered", "late"]


def record(number: int, status: str, hour: int, *told: str) -> RetrainRecord:
    time = f"2026-11-22T{hour:02}:00:00.000Z"
    return RetrainRecord(number, "petnames", time, "", status=status, ended_at=time, told=told)


@pytest.mark.parametrize(
    ("earlier", "late_at", "events"),
    [
        ([], None, ()),
        ([], 5, ("recovered",)),  # a model without a first version was late
        ([record(1, "promoted", 3)], None, ()),
        ([record(1, "promoted", 3)], 5, ("recovered",)),
        ([record(1, "promoted", 7)], 5, ()),  # that success has ended it
        ([record(2, "failed", 4, "failed"), record(1, "promoted", 3)], None, ("recovered",)),
        ([record(2, "failed", 4, "failed"), record(1, "promoted", 3)], 5, ("recovered",)),
    ],
)
def test_success_after_an_alarm_is_told_as_recovered(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    earlier: list[RetrainRecord],
    late_at: int | None,
    events: tuple[str, ...],
) -> None:
    records = RetrainRecords(ModelRegistry.open(str(tmp_path)).folder, "petnames")
    if late_at is not None:
        monkeypatch.setattr(records_module, "utc_now", lambda: f"2026-11-22T{late_at:02}:00:00.000Z")
        records.record_late()
    resolved = SimpleNamespace(config=SimpleNamespace(notify=SimpleNamespace(on=ON)))
    start = cast(Start, SimpleNamespace(resolved=resolved, earlier=earlier, records=records))
    assert events_to_tell(ON, "unchanged", _earlier_states(start, record(9, "unchanged", 9))) == events


@pytest.mark.parametrize(
    ("before", "status", "events"),
    [
        (record(2, "failed", 4, "failed"), "failed", ()),  # once for a week without a cluster
        (record(2, "failed", 4), "failed", ("failed",)),  # nobody got the message
        (record(2, "failed", 4, "failed"), "promoted", ("recovered",)),
        (record(2, "deadline", 5, "failed"), "promoted", ("recovered",)),  # failed, continued, continued again
        (record(2, "deadline", 5), "promoted", ()),
        (record(2, "running", 5), "failed", ("failed",)),
    ],
)
def test_retraining_that_is_continued_has_a_past(before: RetrainRecord, status: str, events: tuple[str, ...]) -> None:
    resolved = SimpleNamespace(config=SimpleNamespace(notify=SimpleNamespace(on=ON)))
    records = SimpleNamespace(late_told=str)
    earlier = [before, record(1, "promoted", 3)]
    start = cast(Start, SimpleNamespace(resolved=resolved, earlier=earlier, records=records))
    assert events_to_tell(ON, status, _earlier_states(start, record(2, status, 9, *before.told))) == events


def test_alarm_is_no_retraining(tmp_path: Path) -> None:
    records = RetrainRecords(ModelRegistry.open(str(tmp_path)).folder, "petnames")
    assert records.late_told() == ""
    records.record_late()
    assert records.late_told().endswith("Z")
    assert records.numbers() == [] and records.newest(5) == []


def test_alarm_of_a_clock_that_was_wrong_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = RetrainRecords(ModelRegistry.open(str(tmp_path)).folder, "petnames")
    monkeypatch.setattr(records_module, "utc_now", lambda: "2031-01-01T03:00:00.000Z")
    records.record_late()
    assert records.late_told() == "2031-01-01T03:00:00.000Z"
    monkeypatch.setattr(records_module, "utc_now", lambda: "2026-11-22T05:00:00.000Z")
    assert records.late_told() == ""
