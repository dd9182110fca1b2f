"""A report as JUnit XML, which CI services show as test results: one test case for the run, each rank, stage and
condition of the gate. It is valid against junit-10.xsd of Jenkins' xUnit plug-in, and GitLab reads it.
"""

from __future__ import annotations

import re
from collections import Counter
from xml.etree import ElementTree as ET

from ddptrain.errors import ExitCode
from ddptrain.redact import hide_credentials
from ddptrain.reports.facts import RunReport
from ddptrain.sanitize import sanitized

FAILURE, ERROR, SKIPPED = "failure", "error", "skipped"
_OF_TRAINING = (ExitCode.TRAINING_FAILED, ExitCode.HANG)
_NOTHING_DONE = ("unchanged", "skipped", "checked")
_NOT_XML = re.compile("[\ufffe\uffff]")


def junit_xml(report: RunReport) -> bytes:
    """Return the file's content, in UTF-8."""
    view = report.view
    name = report.name
    suite = _Suite(name)
    for problem in report.problems:
        suite.add(name, f"configuration {problem.key}".strip(), ERROR, str(problem), "ConfigError")
    if not report.problems:
        failure, duration_s = report.failure, view.duration_s if view is not None else None
        kind = (failure.type or failure.kind) if failure is not None else report.status
        at = f"at {report.source}\n" if report.source is not None else ""
        text = at + failure.traceback if failure is not None else ""
        suite.add(name, "run", _result_of_run(report), report.cause, kind, text, duration_s=duration_s)
    for rank in report.ranks:
        result = FAILURE if rank.failed else SKIPPED if rank.message else ""
        output = "\n".join(report.tails.get(rank.rank, ()))
        suite.add(f"{name}.ranks", f"rank {rank.rank}", result, rank.message, rank.outcome, output=output)
    for stage in report.stages:
        result = {"failed": FAILURE, "skipped": SKIPPED}.get(stage.status, "")
        suite.add(f"{name}.stages", stage.name, result, stage.detail, duration_s=stage.duration_s)
    for each in report.gate:
        suite.add(f"{name}.gate", each.metric, "" if each.passed else FAILURE, each.reason, "gate")

    root = ET.Element("testsuites", {"name": "ddptrain"})
    root.append(suite.element)
    counts = {f"{result}s": str(suite.results[result]) for result in (FAILURE, ERROR)}
    totals = {"tests": str(suite.results.total()), **counts, "time": _time((view and view.duration_s) or 0.0)}
    root.attrib |= totals
    suite.element.attrib |= {**totals, "skipped": str(suite.results[SKIPPED])}
    properties = {"status": report.status, "exit_code": str(report.exit_code), "model": report.model}
    properties["version"] = "" if report.version is None else str(report.version)
    if view is not None:
        properties |= {"run": view.run_id, "run_dir": view.where}
        about = {"timestamp": view.record.started_at[:19], "hostname": view.record.driver.host}
        suite.element.attrib |= {key: _text(value) for key, value in about.items() if value}
    for key, value in properties.items():
        if value:
            ET.SubElement(suite.properties, "property", {"name": key, "value": _text(value)})
    ET.indent(root)
    content: bytes = ET.tostring(root, encoding="UTF-8", xml_declaration=True)
    return content + b"\n"


def _result_of_run(report: RunReport) -> str:
    if report.exit_code == ExitCode.SUCCEEDED:
        return SKIPPED if report.status in _NOTHING_DONE else ""
    if report.exit_code == ExitCode.REJECTED and any(not each.passed for each in report.gate):
        return ""  # the condition fails
    return FAILURE if report.exit_code in (*_OF_TRAINING, ExitCode.REJECTED) else ERROR


class _Suite:
    """The element with all test cases; results: how many have which result, "" for passed."""

    def __init__(self, name: str) -> None:
        self.element = ET.Element("testsuite", {"name": _text(name)})
        self.properties = ET.SubElement(self.element, "properties")
        self.results: Counter[str] = Counter()
        self._seen: Counter[tuple[str, str]] = Counter()

    def add(
        self, group: str, name: str, result: str, message: str, kind: str = "", text: str = "", output: str = "",
        duration_s: float | None = None,
    ) -> None:  # fmt: skip
        """Add a test case; several of one name, as two conditions of a metric, are numbered."""
        self.results[result] += 1
        self._seen[group, name] += 1
        count = self._seen[group, name]
        shown = name if count == 1 else f"{name} ({count})"
        case = ET.SubElement(self.element, "testcase", {"classname": _text(group), "name": _text(shown)})
        if duration_s is not None:
            case.set("time", _time(duration_s))
        if result:
            outcome = ET.SubElement(case, result, {"message": _text(message)})
            if kind:
                outcome.set("type", _text(kind))
            outcome.text = _text(text) or None
        if output:
            ET.SubElement(case, "system-out").text = _text(output)


def _text(text: str) -> str:
    """Return the text without credentials, and without characters that XML does not have."""
    return _NOT_XML.sub("", sanitized(hide_credentials(text)))


def _time(seconds: float) -> str:
    return f"{seconds:.3f}"
