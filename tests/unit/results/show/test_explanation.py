"""The text of `ddptrain explain RUN`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView
from ddptrain.results.run_record import DriverRecord, FailureRecord, RunRecord
from ddptrain.results.show.explanation import explain_run


def view(tmp_path: Path, **fields: object) -> RunView:
    return RunView(RunLayout(tmp_path / "r-1"), RunRecord(run_id="r-1", **fields))  # type: ignore[arg-type]


def test_failed_run_names_cause_log_and_next_step(tmp_path: Path) -> None:
    failure = FailureRecord(1, "vm", "exception", "ValueError", "31 samples\nmore", log="runs/r-1/logs/rank-1.log")
    record = {"status": "failed", "exit_code": 1, "failure": failure, "checkpoints": ("step-20", "step-10")}
    text = explain_run(view(tmp_path, **record), " --runs-dir x").as_text()
    assert text[0] == "run r-1 failed (exit code 1)"
    assert text[3] == "  rank 1 on vm: ValueError: 31 samples"
    assert "  ddptrain results logs r-1 --rank 1 --runs-dir x" in text
    assert text[text.index("what to do next:") + 1 :][:2] == [
        "  fix the root cause",
        "  the same command again, with --resume r-1 (continues from step-20)",
    ]
    assert "  ddptrain explain 1 (likely causes, and what to do)" in text


def test_preempted_run_is_only_continued(tmp_path: Path) -> None:
    found = explain_run(view(tmp_path, status="preempted", exit_code=75, checkpoints=("step-3",)), "")
    assert found.next == ("the same command again, with --resume r-1 (continues from step-3)",)


def test_run_without_a_checkpoint_starts_again(tmp_path: Path) -> None:
    found = explain_run(view(tmp_path, status="failed", exit_code=5), "")
    assert found.next == ("fix the root cause, and start the run again: it has no checkpoint to continue from",)
    assert f"{tmp_path}/r-1/artifacts/stacks/ (the stacks of all ranks)" in found.look


def test_running_run_is_followed(tmp_path: Path) -> None:
    found = explain_run(view(tmp_path, status="running", driver=DriverRecord(7, "vm")), "")
    assert found.end == "is running in process 7 on vm" and found.exit_code is None
    assert found.next == ("ddptrain watch r-1", "ddptrain stop r-1")


def test_run_that_is_unknown_or_unreadable_is_no_failure_of_the_command(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "r-1")
    found = explain_run(RunView(layout, RunRecord(run_id="r-1", status="unreadable"), "cannot read run.json"), "")
    assert found.end == "is not readable: cannot read run.json"


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (None, ""),
        (FailureRecord(0, "vm", "exit", message="exit code 3\nmore"), "rank 0 on vm: exit code 3"),
        (FailureRecord(None, "vm", "worker", "OutOfMemory", "OutOfMemory"), "vm: OutOfMemory"),
        (FailureRecord(None, "", "driver", "ValueError", "no"), "ValueError: no"),
    ],
)
def test_root_cause_has_place_kind_and_message(tmp_path: Path, failure: FailureRecord | None, cause: str) -> None:
    found = explain_run(view(tmp_path, status="failed", failure=failure), "")
    assert found.root_cause == cause
    shown = ["root cause:", f"  {cause}"] if cause else ["where to look:", "  ddptrain results show r-1"]
    assert found.as_text()[1:4] == ["", *shown]
