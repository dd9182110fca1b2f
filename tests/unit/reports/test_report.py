"""The one-line cause of a report, and the level of its annotation."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.model_registry.retrainings import GateOutcome, RetrainRecord
from ddptrain.reports.report import RunReport
from ddptrain.results.run_record import FailureRecord
from tests.unit.reports.runs import run


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (FailureRecord(1, "h", "exception", "ValueError", "a\nb"), "rank 1 on h: ValueError: a"),
        (FailureRecord(1, "h", "exception", "KeyError", ""), "rank 1 on h: KeyError"),
        (FailureRecord(0, "h", "signal", "", "killed by SIGKILL"), "rank 0 on h: killed by SIGKILL"),
        (FailureRecord(None, "", "infrastructure", "ClusterError", "no cluster"), "no cluster"),
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


@pytest.mark.parametrize("exit_code", [1, 2, 3, 4, 5, 6])
def test_failures_are_errors(exit_code: int) -> None:
    assert RunReport("m", "x", exit_code).level == "error"


@pytest.mark.parametrize("exit_code", [7, 8, 75, 129, 130, 131, 143])
def test_early_ends_and_rejections_are_warnings(exit_code: int) -> None:
    assert RunReport("m", "x", exit_code).level == "warning"


def test_success_has_no_level() -> None:
    assert RunReport("m", "x", 0).level == ""


def test_run_without_an_exit_code_is_no_success(tmp_path: Path) -> None:
    assert RunReport.of_run(run(tmp_path, "failed", exit_code=None)).exit_code == 3
