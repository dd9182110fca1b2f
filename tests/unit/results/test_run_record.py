from __future__ import annotations

import json
import math
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
    SlowRankRecord,
    as_json_data,
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


@pytest.mark.parametrize(
    ("own_s", "median_s", "causes", "words"),
    [
        (1.5, 1.0, ("low clock", "swap"), "1.5 s in each step, 1.5 times the median of 1 s; low clock; swap"),
        (0.9994, 0.25, (), "999 ms in each step, 4.0 times the median of 250 ms; the system metrics show no reason"),
        (2.0, 0.0, ("x",), "2 s in each step, longer than the median of 0 ms; x"),
    ],
)
def test_a_slow_rank_is_told_with_its_times(own_s: float, median_s: float, causes: tuple[str, ...], words: str) -> None:
    record = SlowRankRecord(rank=3, host="h", own_s=own_s, median_s=median_s, causes=causes)
    assert record.words == f"rank 3 on h is slow: its own work takes {words}"
