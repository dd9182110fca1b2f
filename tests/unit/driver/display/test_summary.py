"""The last words on a run, for people."""

from __future__ import annotations

import dataclasses
import math
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from ddptrain.driver.display.summary import finished_event, summary_lines
from ddptrain.errors import ExitCode
from ddptrain.protocol.events import Metrics
from ddptrain.results.run import Run
from ddptrain.results.run_record import AttemptRecord, BestRecord, FailureRecord, RunRecord, RunStatus
from ddptrain.results.run_writer import RunWriter


def ended(writer: RunWriter, status: RunStatus, duration_s: float) -> Run:
    return Run(writer.layout.root, dataclasses.replace(writer.record, status=status, duration_s=duration_s))


@pytest.mark.parametrize(("ranks", "on"), [(0, ""), (1, " on 1 rank"), (8, " on 8 ranks")])
def test_the_ranks_are_counted_where_there_were_any(tmp_path: Path, ranks: int, on: str) -> None:
    with RunWriter.create(tmp_path, "r", "name", "", "workload", world_size=ranks) as writer:
        told = summary_lines(ended(writer, RunStatus.FAILED, 1.25))
    assert told == [
        f"run r failed after 1.2 s{on}",
        f"  results {tmp_path / 'r'}",
        f"  next    ddptrain explain r --runs-dir {tmp_path}",
    ]


@pytest.mark.parametrize("status", [RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.PREEMPTED])
def test_run_that_can_be_resumed_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: RunStatus) -> None:
    monkeypatch.chdir(tmp_path)
    with RunWriter.create(tmp_path / "runs", "r", "name", "", "workload") as writer:
        writer.update(checkpoints=("step-20", "step-10"))
        told = summary_lines(ended(writer, status, 1.0))
    assert told[-1] == "  next    ddptrain explain r; --resume r continues from step-20"


def test_where_the_time_went_is_one_line(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, "r", "name", "", "workload", world_size=1) as writer:
        began = datetime.fromisoformat(writer.record.started_at)
        started, end = ((began + timedelta(seconds=seconds)).isoformat() for seconds in (3, 60))
        writer.update(attempts=(AttemptRecord(1, started, end, 1, "succeeded"),), ended_at=end)
        for kind, seconds in (("run_started", 3), ("entered", 5), ("timed", 40), ("finished", 58)):
            fields = {"attempt": 1, "activity": "evaluation", "seconds": 10.5}
            writer.event({"event": kind, "run_s": seconds, **fields})
        told = summary_lines(ended(writer, RunStatus.SUCCEEDED, 60.0))
    line = "  time    queue 3.0 s, start 2.0 s, training 42.5 s, evaluation 10.5 s, end 2.0 s"
    assert told[1:] == [line, f"  results {tmp_path / 'r'}"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-12.3456, "-12.35"),
        (999.96, "1000"),
        (-1234567.8, "-1,234,568"),
    ],
)
def test_last_metrics_have_four_digits_or_all_before_the_point(tmp_path: Path, value: float, text: str) -> None:
    with RunWriter.create(tmp_path, "r", "name", "", "workload") as writer:
        writer.add_metrics([Metrics(1, {"loss": value, "acc": 0.5, "gone": math.nan})], 0)
        writer.update(best=BestRecord("acc", "max", 0.98765, 7))
        told = summary_lines(ended(writer, RunStatus.SUCCEEDED, 1.0))
    assert told[1:3] == [f"  last    acc 0.5, gone nan, loss {text}", "  best    acc 0.9877 at step 7"]


def test_twenty_of_many_metrics_are_told(tmp_path: Path) -> None:
    for count, more in ((20, ""), (1_500, ", and 1,480 more")):
        with RunWriter.create(tmp_path, f"r{count}", "name", "", "workload") as writer:
            writer.add_metrics([Metrics(1, {f"k{number:04}": 1.0 for number in range(count)})], 0)
            told = summary_lines(ended(writer, RunStatus.SUCCEEDED, 1.0))
        assert told[1].endswith(f", k0019 1{more}")


def test_last_event_has_the_end(tmp_path: Path) -> None:
    failure = FailureRecord(1, "h1", "exception", "ValueError", "no", "trace", "log")
    with RunWriter.create(tmp_path, "r", "name", "", "workload") as writer:
        writer.update(best=BestRecord("acc", "max", 0.5, 7), result=[1])
        writer.finish(RunStatus.FAILED, ExitCode.HANG, failure)
        writer.update(duration_s=12.34567)
        event = finished_event(Run(writer.layout.root, writer.record))
    del event["time_use_s"], event["goodput"]
    assert event == {
        "event": "run_finished",
        "run_id": "r",
        "run_dir": str(tmp_path / "r"),
        "status": "failed",
        "exit_code": 5,
        "duration_s": 12.346,
        "last_metrics": {},
        "best": {"metric": "acc", "mode": "max", "value": 0.5, "step": 7},
        "result": [1],
        "failure": dataclasses.asdict(failure),
    }
    assert type(event["exit_code"]) is int


@pytest.mark.parametrize(("exit_code", "expected"), [(None, 4), (75, 75)])
def test_run_whose_driver_has_written_no_end_has_the_exit_code_of_a_lost_cluster(
    tmp_path: Path, exit_code: int | None, expected: int
) -> None:
    record = RunRecord(run_id="r", status="preempted", exit_code=exit_code)
    event = finished_event(Run(tmp_path / "r", record))
    assert (event["exit_code"], event["duration_s"], event["failure"]) == (expected, 0.0, None)
