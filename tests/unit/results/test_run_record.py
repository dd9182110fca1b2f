from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ddptrain.results.run_record import (
    AttemptRecord,
    BestRecord,
    DriverRecord,
    EnvironmentValue,
    FailureRecord,
    GitRecord,
    RankRecord,
    RecordError,
    RunRecord,
    RunStatus,
    as_json_data,
    ascii_json,
    utc_now,
)


def full_record() -> RunRecord:
    ranks = (RankRecord(0, 0, 0, "h", 11, None, 0), RankRecord(1, 1, 0, "h", 12, "1", -9))
    return RunRecord(
        run_id="r",
        name="n",
        workload="petnames",
        status="failed",
        exit_code=1,
        started_at="2025-01-01T00:00:00.000Z",
        ended_at="2025-01-01T00:00:01.000Z",
        duration_s=1.0,
        world_size=2,
        attempts=(AttemptRecord(1, "s", "e", 2, "failed", ranks),),
        failure=FailureRecord(1, "h", "signal", "", "killed by SIGKILL", "", "logs/rank-1.log"),
        git=GitRecord("abc", dirty=True),
        versions={"python": "3.11"},
        rank_environment={"OMP_NUM_THREADS": EnvironmentValue("1", "user")},
        driver=DriverRecord(5, "h"),
        last_metrics={"train/loss": 1.5},
        best=BestRecord("val/loss", "min", 1.25, 10),
        checkpoints=("step-20", "step-10"),
    )


def test_a_record_comes_back_as_it_was_written() -> None:
    assert RunRecord.from_json(full_record().to_json()) == full_record()


def test_run_json_has_the_fields_of_the_contract() -> None:
    data = json.loads(full_record().to_json())
    assert data["schema"] == 1
    assert data["attempts"][0]["ranks"][1] == {
        "rank": 1,
        "local_rank": 1,
        "node_rank": 0,
        "host": "h",
        "pid": 12,
        "gpu": "1",
        "exit": -9,
    }
    assert set(data["failure"]) == {"rank", "host", "kind", "type", "message", "traceback", "log"}
    assert data["rank_environment"] == {"OMP_NUM_THREADS": {"value": "1", "source": "user"}}


def test_a_record_of_a_newer_version_is_read_as_far_as_it_is_known() -> None:
    data = json.loads(full_record().to_json())
    data |= {"schema": 9, "colour": "red", "status": "paused"}
    data["failure"]["blame"] = {}
    data["attempts"][0]["ranks"][0]["gpu"] = 3
    data["git"] = "abc"
    del data["versions"], data["driver"]
    record = RunRecord.from_json(json.dumps(data))
    assert (record.schema, record.status, record.git, record.versions) == (9, "paused", None, {})
    assert record.attempts[0].ranks[0].gpu is None
    assert record.failure == full_record().failure


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"run_id": "r"}',
        b'{"run_id": "r", "status": 3}',
        b"\xff\xfe{",
        b"[" * 100_000,
    ],
)
def test_what_is_no_record_is_refused(text: bytes) -> None:
    with pytest.raises(RecordError):
        RunRecord.from_json(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attempts", {"a": 1}),
        ("attempts", [1, None]),
        ("checkpoints", "step-1"),
        ("world_size", True),
        ("best", []),
    ],
)
def test_a_field_of_another_type_takes_its_default(field: str, value: Any) -> None:
    record = RunRecord.from_json(json.dumps({"run_id": "r", "status": "failed", field: value}))
    assert record == RunRecord(run_id="r", status="failed")


def test_numbers_that_are_not_finite_are_written_as_null() -> None:
    data = as_json_data({"a": math.nan, "b": [math.inf, 1], 3: {"c": object}})
    assert data == {"a": None, "b": [None, 1], "3": {"c": str(object)}}
    assert '"x": null' in RunRecord(run_id="r", last_metrics={"x": math.nan}).to_json()


def test_wrong_items_of_collections_are_left_out() -> None:
    raw = {"run_id": "r", "status": "failed", "checkpoints": ["step-1", 2, None], "versions": {"a": "1", "b": 2}}
    record = RunRecord.from_json(json.dumps({**raw, "last_metrics": {"a": 1, "b": None, "c": "x", "d": True}}))
    assert (record.checkpoints, record.versions) == (("step-1",), {"a": "1"})
    assert record.last_metrics == {"a": 1, "b": None}
    wrong = {"checkpoints": "step-1", "versions": [], "attempts": {}, "exit_code": True, "waiting": 1, "git": "abc"}
    record = RunRecord.from_json(json.dumps({"run_id": "r", "status": "failed", **wrong, "duration_s": 10**400}))
    assert record == RunRecord(run_id="r", status="failed")


def test_json_is_ascii_in_one_line_or_indented() -> None:
    assert ascii_json({"a": [1.5, float("nan"), None, True]}) == b'{"a":[1.5,null,null,true]}'
    assert ascii_json({"a": "\u2028", "b": 1}) == b'{"a":"\\u2028","b":1}'
    assert ascii_json({"a": "\ud800"}, indent=2) == b'{\n  "a": "\\ud800"\n}'
    assert ascii_json({"a": 1}, indent=2) == b'{\n  "a": 1\n}'


def test_any_value_becomes_json_data() -> None:
    values = {1: (1, 2.5), "b": {3}, "c": Path("x"), "d": RunStatus.FAILED, "e": None, "f": True, "g": float("-inf")}
    assert as_json_data(values) == {"1": [1, 2.5], "b": [3], "c": "x", "d": "failed", "e": None, "f": True, "g": None}
    assert type(as_json_data(RunStatus.FAILED)) is str
    assert as_json_data(GitRecord("abc")) == {"commit": "abc", "dirty": False}
    assert as_json_data(GitRecord) == "<class 'ddptrain.results.run_record.GitRecord'>"


def test_time_now_is_utc_with_milliseconds() -> None:
    text = utc_now()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", text)
    assert abs((datetime.now(UTC) - datetime.fromisoformat(text)).total_seconds()) < 600
