"""JUnit XML: valid, and the cases that CI services count."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import xmlschema

from ddptrain.errors import ClusterError, ConfigError, Problem, RunLocked
from ddptrain.model_registry.retrainings import GateOutcome, RetrainRecord
from ddptrain.reports.facts import RunReport, StageReport
from ddptrain.reports.junit import junit_xml
from ddptrain.results.run_record import FailureRecord
from tests.unit.reports.runs import failed_run, run


@cache
def schema() -> Any:
    return xmlschema.XMLSchema(Path(__file__).with_name("junit-10.xsd"))


def suite_of(report: RunReport, folder: Path) -> ET.Element:
    """The suite of the report, which is valid and whose counts are right."""
    content = junit_xml(replace(report, workspace=folder))
    schema().validate(content.decode())
    root = ET.fromstring(content)
    (suite,) = root
    for counted in (root, suite):
        assert int(counted.get("tests", "")) == len(suite.findall("testcase"))
        assert int(counted.get("failures", "")) == len(suite.findall("testcase/failure"))
        assert int(counted.get("errors", "")) == len(suite.findall("testcase/error"))
    assert int(suite.get("skipped", "")) == len(suite.findall("testcase/skipped"))
    return suite


def outcomes(suite: ET.Element) -> dict[str, str]:
    cases = suite.findall("testcase")
    found = {f"{case.get('classname')}: {case.get('name')}": next((each.tag for each in case), "") for case in cases}
    assert len(found) == len(cases)
    return found


def test_run_that_succeeded(tmp_path: Path) -> None:
    suite = suite_of(RunReport.of_run(run(tmp_path)), tmp_path)
    assert outcomes(suite) == {"toy: run": "", "toy.ranks: rank 0": "", "toy.ranks: rank 1": ""}
    assert (suite.get("name"), suite.get("time")) == ("toy", "4.153")


def test_run_that_failed_shows_the_frames_and_the_last_lines(tmp_path: Path) -> None:
    suite = suite_of(RunReport.of_run(failed_run(tmp_path)), tmp_path)
    assert outcomes(suite) == {
        "toy: run": "failure",
        "toy.ranks: rank 0": "skipped",
        "toy.ranks: rank 1": "failure",
        "toy.ranks: rank 2": "skipped",
    }
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert (failure.get("type"), failure.get("message")) == ("ValueError", "rank 1 on node-1: ValueError: wrong shape")
    assert (failure.text or "").startswith("at train.py:4\nTraceback (most recent call last):\n")
    assert [each.text for each in suite.iter("system-out")] == ["step 1\nValueError: wrong shape"]
    assert suite.get("timestamp") == "2026-11-22T17:30:00"


def test_gate_and_stages_are_cases(tmp_path: Path) -> None:
    report = RunReport(
        "m",
        "rejected",
        7,
        retraining=RetrainRecord(
            1,
            "m",
            "",
            gate=(
                GateOutcome("loss", False, "2 is not < 1"),
                GateOutcome("accuracy", True, "fine"),
                GateOutcome("loss", True, "x"),
            ),
        ),
        stages=[
            StageReport("train", "done", 1.5),
            StageReport("evaluate", "failed", 2.0, "boom"),
            StageReport("promote", "skipped"),
        ],
    )
    assert outcomes(suite_of(report, tmp_path)) == {
        "m: run": "",
        "m.stages: train": "",
        "m.stages: evaluate": "failure",
        "m.stages: promote": "skipped",
        "m.gate: loss": "failure",
        "m.gate: accuracy": "",
        "m.gate: loss (2)": "",
    }


@pytest.mark.parametrize(
    ("report", "outcome"),
    [
        (RunReport("m", "unchanged", 0, "nothing has changed"), "skipped"),
        (RunReport("m", "promoted", 0), ""),
        (RunReport("m", "rejected", 7, "worse"), "failure"),
        (RunReport("m", "failed", 5, "hung"), "failure"),
        (RunReport("m", "preempted", 75), "error"),
        (RunReport("m", "deadline", 8), "error"),
        (RunReport.of_error("m", ClusterError("no cluster")), "error"),
        (RunReport.of_error("m", RunLocked("another process")), "error"),
    ],
)
def test_case_of_the_run(tmp_path: Path, report: RunReport, outcome: str) -> None:
    assert outcomes(suite_of(report, tmp_path)) == {"m: run": outcome}


def test_each_problem_of_a_configuration_is_an_error(tmp_path: Path) -> None:
    problems = [
        Problem("a.yaml:1", "x", "is wrong"),
        Problem("a.yaml", "", "is empty"),
        Problem("a.yaml:2", "x", "again"),
    ]
    suite = suite_of(RunReport.of_error("a", ConfigError(problems)), tmp_path)
    assert outcomes(suite) == {
        "a: configuration x": "error",
        "a: configuration": "error",
        "a: configuration x (2)": "error",
    }
    assert [each.get("message") for each in suite.iter("error")] == [
        "a.yaml:1: x: is wrong",
        "a.yaml: is empty",
        "a.yaml:2: x: again",
    ]


def test_text_that_xml_does_not_have_is_left_out(tmp_path: Path) -> None:
    odd = 'a\x00\x1b[31m\ufffe\ud800<&>"]]>é token=hunter22'
    failure = FailureRecord(1, "h", "exception", odd, odd, odd)
    view = failed_run(tmp_path, failure=failure, logs={1: "\x0c]]>\n"}, name=odd)
    suite = suite_of(RunReport.of_run(view), tmp_path)
    found = suite.find("testcase/failure")
    assert found is not None
    assert found.get("type") == 'a<&>"]]>é token=<left out>'
