"""Facts of reports: results of ranks, and lines of failures."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ddptrain import ci
from ddptrain.errors import Problem
from ddptrain.model_registry.retrainings import GateOutcome, RetrainRecord
from ddptrain.reports.facts import RankResult, RunReport, line_of_problem, rank_results
from ddptrain.results.run_record import CodeRecord, FailureRecord
from tests.unit.reports.runs import failed_run, run

# --- Which ranks failed by themselves ---


def test_victims_and_stopped_ranks_did_not_fail(tmp_path: Path) -> None:
    assert rank_results(failed_run(tmp_path)) == [
        RankResult(0, "node-1", "stopped", "stopped because the run ended"),
        RankResult(1, "node-1", "failed", "ValueError: wrong shape"),
        RankResult(2, "node-1", "stopped", "lost its connection: connection closed"),
    ]


def test_only_the_last_attempt_counts(tmp_path: Path) -> None:
    fault = {"event": "fault", "rank": 0, "message": "boom", "victim": False}
    again = {"event": "run_started", "attempt": 2}
    assert [each.outcome for each in rank_results(run(tmp_path, events=[fault, again]))] == ["passed", "passed"]


def test_victim_that_is_the_root_cause_failed(tmp_path: Path) -> None:
    fault = {"event": "fault", "rank": 0, "message": "connection closed", "victim": True}
    view = run(tmp_path, "failed", (1, 0), [fault], failure=FailureRecord(0, message="connection closed"))
    assert [each.outcome for each in rank_results(view)] == ["failed", "passed"]


def test_exit_codes_count_where_events_are_missing_or_damaged(tmp_path: Path) -> None:
    view = run(tmp_path, "failed", (3, 0, None), failure=FailureRecord(message="a worker is lost"))
    for text in ("", '{"time_s" fault', '{"time_s":1,"event":"fault"}\n{"time_s":1,"event":["fault"]}\n[]\n'):
        view.events_jsonl.write_text(text)
        assert [each.outcome for each in rank_results(view)] == ["failed", "passed", "stopped"]
    view.events_jsonl.unlink()
    assert rank_results(view)[0] == RankResult(0, "node-1", "failed", "exit code 3")


def test_ranks_of_a_run_that_was_told_to_end_did_not_fail(tmp_path: Path) -> None:
    ended = FailureRecord(0, "node-1", "interrupted", "SIGINT", "ended by a user")
    results = rank_results(run(tmp_path, "cancelled", (-15, 1), failure=ended))
    assert [each.outcome for each in results] == ["stopped", "stopped"]


def test_run_without_ranks_has_none(tmp_path: Path) -> None:
    assert rank_results(run(tmp_path, "failed", attempts=())) == []


# --- The line of the user's code in a traceback ---


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    for name in ("train.py", "lib/model.py", "venv/lib/python3.11/site-packages/torch/nn.py", "other/model.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x\n")
    return folder


def found(workspace: Path, *frames: str, code: CodeRecord | None = None, indent: str = "  ") -> str:
    trace = "".join(f"{indent}File {frame}, in main\n{indent}  call()\n" for frame in frames)
    text = f"Traceback (most recent call last):\n{trace}ValueError: 'File \"/x\", line 1'\n"
    view = run(workspace.parent / "runs", "failed", failure=FailureRecord(traceback=text), code=code)
    shutil.rmtree(view.root.parent)
    return str(replace(RunReport.of_run(view), workspace=workspace).source)


def test_last_frame_of_the_workspace_counts(workspace: Path) -> None:
    installed = f'"{workspace}/venv/lib/python3.11/site-packages/torch/nn.py", line 5'
    standard = f'"{json.__file__}", line 3'
    package = f'"{ci.__file__}", line 3'
    frames = [f'"{workspace}/train.py", line 12', f'"{workspace}/lib/model.py", line 7', installed, standard, package]
    assert found(workspace, *frames) == "lib/model.py:7"
    assert found(Path("/"), *frames[:1]) == f"{workspace}/train.py:12".removeprefix("/")


def test_frames_elsewhere_and_without_a_file_are_none(workspace: Path) -> None:
    assert found(workspace / "lib", f'"{workspace}/train.py", line 12') == "None"
    assert (
        found(workspace, '"<frozen importlib>", line 1', f'"{workspace}/gone.py", line 1', '"a\0b", line 2') == "None"
    )
    assert found(workspace) == "None"


def test_path_that_leaves_the_workspace_is_refused(workspace: Path) -> None:
    (workspace.parent / "secret.py").write_text("")
    (workspace / "link.py").symlink_to(workspace.parent / "secret.py")
    assert found(workspace, f'"{workspace}/../secret.py", line 1', f'"{workspace}/link.py", line 1') == "None"


def test_uploaded_code_is_found_in_its_project(workspace: Path) -> None:
    code = CodeRecord("0a1b2c", str(workspace / "lib"))
    assert found(workspace, '"/home/x/.cache/ddptrain/code/0a1b2c/model.py", line 9', code=code) == "lib/model.py:9"


def test_frames_of_exception_groups_count(workspace: Path) -> None:
    assert found(workspace, f'"{workspace}/train.py", line 3', indent="    | ") == "train.py:3"


def test_problem_of_a_configuration_is_relative_to_the_folder(workspace: Path) -> None:
    (workspace / "lib" / "a.yaml").write_text("x")
    assert str(line_of_problem(Problem("a.yaml:12", "x", "wrong"), workspace, workspace / "lib")) == "lib/a.yaml:12"
    for where in ("a.yaml", "--ranks 0", "gone.yaml:3", ""):
        assert line_of_problem(Problem(where, "x", "wrong"), workspace, workspace / "lib") is None


# --- The one-line cause of a report, and the level of its annotation ---


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (FailureRecord(1, "h", "exception", "ValueError", "a\nb"), "rank 1 on h: ValueError: a"),
        (FailureRecord(1, "h", "exception", "KeyError", ""), "rank 1 on h: KeyError"),
        (FailureRecord(0, "h", "signal", "", "killed by SIGKILL"), "rank 0 on h: killed by SIGKILL"),
        (FailureRecord(None, "", "infrastructure", "ClusterError", "no cluster"), "ClusterError: no cluster"),
        (FailureRecord(None, "", "worker_lost"), "worker_lost"),
        (None, ""),
    ],
)
def test_cause_is_that_of_the_run(tmp_path: Path, failure: FailureRecord | None, cause: str) -> None:
    view = run(tmp_path, "failed", failure=failure)
    assert RunReport.of_run(view).cause == cause
    gate = (GateOutcome("a", False, "a 1 > 0"), GateOutcome("b", True, "fine"), GateOutcome("c", False, "c is missing"))
    rejected = RunReport("m", "rejected", 7, view=view, retraining=RetrainRecord(1, "m", "", gate=gate))
    assert rejected.cause == "a 1 > 0; c is missing"


@pytest.mark.parametrize(
    ("exit_code", "level"), [(0, ""), (1, "error"), (6, "error"), (7, "warning"), (130, "warning")]
)
def test_early_ends_and_rejections_are_warnings(exit_code: int, level: str) -> None:
    assert RunReport("m", "x", exit_code).level == level


def test_run_without_an_exit_code_is_no_success(tmp_path: Path) -> None:
    assert RunReport.of_run(run(tmp_path, "failed", exit_code=None)).exit_code == 3
