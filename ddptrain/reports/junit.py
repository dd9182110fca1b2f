"""A report as JUnit XML, which CI services show as test results: one test case for the run, each rank, stage and
condition of the gate. It is valid against junit-10.xsd of Jenkins' xUnit plug-in, and GitLab reads it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from ddptrain.errors import ExitCode
from ddptrain.redact import hide_credentials
from ddptrain.reports.facts import Facts, RankResult, RunReport
from ddptrain.sanitize import sanitized

FAILURE, ERROR, SKIPPED = "failure", "error", "skipped"
_OF_TRAINING = (ExitCode.TRAINING_FAILED, ExitCode.HANG)
_NOTHING_DONE = ("unchanged", "skipped", "checked")
_NOT_XML = re.compile("[\ufffe\uffff]")


@dataclass(slots=True)
class _Case:
    """A test case; `result` is FAILURE, ERROR, SKIPPED or "" for passed."""

    group: str
    name: str
    result: str = ""
    message: str = ""
    kind: str = ""
    text: str = ""
    output: str = ""
    duration_s: float | None = None


def junit_xml(facts: Facts) -> bytes:
    """Return the file's content, in UTF-8."""
    report, cases = facts.report, _cases(facts)
    view = report.view
    counts = {f"{result}s": sum(case.result == result for case in cases) for result in (FAILURE, ERROR)}
    totals = {"tests": str(len(cases)), **{name: str(count) for name, count in counts.items()}}
    duration_s = (view.duration_s if view is not None else None) or 0.0
    root = ET.Element("testsuites", {"name": "ddptrain", **totals, "time": _time(duration_s)})
    skipped = str(sum(case.result == SKIPPED for case in cases))
    suite = ET.SubElement(root, "testsuite", {"name": _text(report.name), **totals, "skipped": skipped})
    suite.set("time", _time(duration_s))
    if view is not None:
        facts_of_run = {"timestamp": view.record.started_at[:19], "hostname": view.record.driver.host}
        suite.attrib |= {name: _text(value) for name, value in facts_of_run.items() if value}
    properties = ET.SubElement(suite, "properties")
    for name, value in _properties(report).items():
        if value:
            ET.SubElement(properties, "property", {"name": name, "value": _text(value)})
    for case in cases:
        _add(suite, case)
    ET.indent(root)
    content: bytes = ET.tostring(root, encoding="UTF-8", xml_declaration=True)
    return content + b"\n"


def _cases(facts: Facts) -> list[_Case]:
    report = facts.report
    cases = [
        _Case(report.name, f"configuration {problem.key}".strip(), ERROR, str(problem), "ConfigError")
        for problem in report.problems
    ] or [_run_case(facts)]
    cases += [_rank_case(facts, rank) for rank in facts.ranks]
    cases += [
        _Case(
            f"{report.name}.stages",
            stage.name,
            FAILURE if stage.status == "failed" else SKIPPED if stage.status == "skipped" else "",
            stage.detail,
            duration_s=stage.duration_s,
        )
        for stage in report.stages
    ]
    cases += [
        _Case(f"{report.name}.gate", each.metric, "" if each.passed else FAILURE, each.reason, "gate")
        for each in report.gate
    ]
    return _distinct(cases)


def _distinct(cases: list[_Case]) -> list[_Case]:
    """Return the cases; several of one name, as two conditions of a metric, are numbered."""
    seen: Counter[tuple[str, str]] = Counter()
    for case in cases:
        seen[case.group, case.name] += 1
        if (number := seen[case.group, case.name]) > 1:
            case.name += f" ({number})"
    return cases


def _run_case(facts: Facts) -> _Case:
    report = facts.report
    case = _Case(report.name, "run", _result_of_run(report), report.cause, report.status)
    if (view := report.view) is not None:
        case.duration_s = view.duration_s
        if (failure := view.record.failure) is not None:
            case.kind = failure.type or failure.kind
            at = f"at {facts.source}\n" if facts.source is not None else ""
            case.text = at + failure.traceback
    return case


def _result_of_run(report: RunReport) -> str:
    if report.exit_code == ExitCode.SUCCEEDED:
        return SKIPPED if report.status in _NOTHING_DONE else ""
    if report.exit_code == ExitCode.REJECTED and any(not each.passed for each in report.gate):
        return ""  # the condition fails
    return FAILURE if report.exit_code in (*_OF_TRAINING, ExitCode.REJECTED) else ERROR


def _rank_case(facts: Facts, rank: RankResult) -> _Case:
    case = _Case(f"{facts.report.name}.ranks", f"rank {rank.rank}", message=rank.message, kind=rank.outcome)
    case.result = FAILURE if rank.failed else SKIPPED if rank.message else ""
    case.output = "\n".join(facts.tails.get(rank.rank, ()))
    return case


def _properties(report: RunReport) -> dict[str, str]:
    view = report.view
    return {
        "status": report.status,
        "exit_code": str(report.exit_code),
        "run": view.run_id if view is not None else "",
        "run_dir": view.layout.where if view is not None else "",
        "model": report.model,
        "version": "" if report.version is None else str(report.version),
    }


def _add(suite: ET.Element, case: _Case) -> None:
    element = ET.SubElement(suite, "testcase", {"classname": _text(case.group), "name": _text(case.name)})
    if case.duration_s is not None:
        element.set("time", _time(case.duration_s))
    if case.result:
        outcome = ET.SubElement(element, case.result, {"message": _text(case.message)})
        if case.kind:
            outcome.set("type", _text(case.kind))
        outcome.text = _text(case.text) or None
    if case.output:
        ET.SubElement(element, "system-out").text = _text(case.output)


def _text(text: str) -> str:
    """Return the text without credentials, and without characters that XML does not have."""
    return _NOT_XML.sub("", sanitized(hide_credentials(text)))


def _time(seconds: float) -> str:
    return f"{seconds:.3f}"
