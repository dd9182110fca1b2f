"""The last words on a run, for people."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from ddptrain.driver.failure.run_end import RunEnd
from ddptrain.driver.failure.summary import summary_lines
from ddptrain.results.run_record import AttemptRecord, RunStatus
from ddptrain.results.run_writer import RunWriter


@pytest.mark.parametrize(("ranks", "on"), [(0, ""), (1, " on 1 rank"), (8, " on 8 ranks")])
def test_the_ranks_are_counted_where_there_were_any(tmp_path: Path, ranks: int, on: str) -> None:
    with RunWriter.create(tmp_path, "r", "name", "", "workload", world_size=ranks) as writer:
        told = summary_lines(writer, RunEnd(RunStatus.FAILED, 4, "no cluster"), 1.25)
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
        told = summary_lines(writer, RunEnd(status, 1), 1.0)
    assert told[-1] == "  next    ddptrain explain r; --resume r continues from step-20"


def test_where_the_time_went_is_one_line(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, "r", "name", "", "workload", world_size=1) as writer:
        began = datetime.fromisoformat(writer.record.started_at)
        started, ended = ((began + timedelta(seconds=seconds)).isoformat() for seconds in (3, 60))
        writer.update(attempts=(AttemptRecord(1, started, ended, 1, "succeeded"),), ended_at=ended)
        for kind, seconds in (("run_started", 3), ("entered", 5), ("timed", 40), ("finished", 58)):
            fields = {"attempt": 1, "activity": "evaluation", "seconds": 10.5}
            writer.event({"event": kind, "time_s": began.timestamp() + seconds, **fields})
        told = summary_lines(writer, RunEnd(RunStatus.SUCCEEDED, 0), 60.0)
    line = "  time    queue 3.0 s, start 2.0 s, training 42.5 s, evaluation 10.5 s, end 2.0 s"
    assert told[1:] == [line, f"  results {tmp_path / 'r'}"]


def test_time_of_all_parts_is_told_and_that_of_the_last(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, "r", "name", "", "workload") as writer:
        writer.update(earlier_s=100.0)
        told = summary_lines(writer, RunEnd(RunStatus.SUCCEEDED, 0), 130.25)
    assert told[0] == "run r succeeded after 130.2 s (30.2 s since it was resumed)"
