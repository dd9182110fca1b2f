"""What all reports of a run show, read from its files once."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ddptrain.errors import Problem
from ddptrain.file_ops import open_regular
from ddptrain.redact import hide_credentials, hide_known
from ddptrain.reports.report import RunReport
from ddptrain.results.lookup import RunView
from ddptrain.results.metrics import LAST_BYTES, read_events
from ddptrain.results.run_record import CodeRecord, FailureRecord, RankRecord
from ddptrain.results.show.log_follower import final_text

TAIL_LINES = 30
MOST_RANKS = 4  # whose last lines are shown
_LINE_CHARACTERS = 500
_READ_BYTES = 256 << 10  # the end of a log
_TAIL_BYTES = 6000  # of one rank, so that a report fits into a comment
_PASSED, _FAILED, _STOPPED = "passed", "failed", "stopped"
_KINDS = ("run_started", "fault", "rank_ended")
_FRAME = re.compile(r'^[ |+]*File "([^"\n]+)", line (\d{1,9})', re.MULTILINE)
_PLACE = re.compile(r"(.+):(\d{1,9})")
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
_PACKAGE = Path(__file__).parents[1]
_STANDARD = Path(sysconfig.get_paths()["stdlib"])


@dataclass(frozen=True, slots=True)
class Facts:
    """A report with what its run has left: how the ranks ended, the last lines of those that failed (one for each
    message, without credentials), and the line of the user's code that the root cause came from.
    """

    report: RunReport
    ranks: Sequence[RankResult] = ()
    tails: Mapping[int, Sequence[str]] = field(default_factory=dict)
    source: SourceLine | None = None


def read_facts(report: RunReport, workspace: Path) -> Facts:
    """Read what the run has left; files that cannot be read are left out."""
    if report.view is None:
        return Facts(report)
    record = report.view.record
    ranks = rank_results(report.view)
    return Facts(
        report, ranks, _tails(report, report.view, ranks), line_of_failure(record.failure, record.code, workspace)
    )


def _tails(report: RunReport, view: RunView, ranks: Sequence[RankResult]) -> dict[int, list[str]]:
    """The last lines of the first ranks that failed, one for each message; that of the root cause comes first."""
    failure = view.record.failure
    first = failure.rank if failure is not None else None
    failed = sorted((each for each in ranks if each.failed), key=lambda each: (each.rank != first, each.rank))
    different = {each.message: each.rank for each in reversed(failed)}  # a mistake that fails on every rank counts once
    tails: dict[int, list[str]] = {}
    logs = view.layout.logs()
    for rank in [each.rank for each in failed if different[each.message] == each.rank][:MOST_RANKS]:
        if rank in logs:
            tails[rank] = last_lines(logs[rank], TAIL_LINES, _TAIL_BYTES, report.secrets)
    return tails


def last_lines(path: Path, most: int, room_bytes: int, secrets: Sequence[str] = ()) -> list[str]:
    """Return the last lines of a log as a terminal shows them, without credentials; none if it cannot be read."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _READ_BYTES))
            lines = file.read(_READ_BYTES).decode("utf-8", "replace").split("\n")
    except OSError:
        return []
    kept: list[str] = []
    for line in reversed((lines if lines[-1] else lines[:-1])[-most:]):
        shown = _shortened(line, secrets)
        room_bytes -= len(shown.encode(errors="replace")) + 1
        if room_bytes < 0:
            break
        kept.append(shown)
    return kept[::-1]


def _shortened(line: str, secrets: Sequence[str]) -> str:
    text = final_text(line if line.count("\r") < 1000 else line.rpartition("\r")[2])
    shown = str(hide_credentials(hide_known(text[: 2 * _LINE_CHARACTERS], secrets)))
    return shown if len(shown) <= _LINE_CHARACTERS else f"{shown[:_LINE_CHARACTERS]}..."


@dataclass(frozen=True, slots=True)
class RankResult:
    """A rank of the last attempt: outcome is passed, failed, or stopped (with `message`: why)."""

    rank: int
    host: str
    outcome: str
    message: str = ""

    @property
    def failed(self) -> bool:
        """Whether it failed by itself."""
        return self.outcome == _FAILED


def rank_results(view: RunView) -> list[RankResult]:
    """Return how the ranks of the last attempt ended, in the order of ranks; none if no rank was started."""
    attempts = view.record.attempts
    faults: dict[int, dict[str, Any]] = {}
    stopped: set[int] = set()
    for event in _last_attempt(view.layout.events_jsonl):
        if event["event"] == "fault":
            faults.setdefault(event["rank"], event)
        elif event["event"] == "rank_ended" and event.get("stopped"):
            stopped.add(event["rank"])
    return [_result(view, rank, faults.get(rank.rank), stopped) for rank in attempts[-1].ranks] if attempts else []


def _result(view: RunView, rank: RankRecord, fault: dict[str, Any] | None, stopped: set[int]) -> RankResult:
    failure = view.record.failure
    is_root_cause = failure is not None and failure.rank == rank.rank
    if fault is not None and (is_root_cause or not fault.get("victim")):
        return RankResult(rank.rank, rank.host, _FAILED, str(fault.get("message", "")))
    if is_root_cause and failure is not None:
        return RankResult(rank.rank, rank.host, _FAILED, failure.message)
    if fault is not None:
        return RankResult(rank.rank, rank.host, _STOPPED, f"lost its connection: {fault.get('message', '')}")
    if rank.rank in stopped or (rank.exit is None and failure is not None):
        return RankResult(rank.rank, rank.host, _STOPPED, "stopped because the run ended")
    if rank.exit:
        return RankResult(rank.rank, rank.host, _FAILED, f"exit code {rank.exit}")
    return RankResult(rank.rank, rank.host, _PASSED)


def _last_attempt(path: Path) -> list[dict[str, Any]]:
    """Return the events since the last start of ranks; none if the file cannot be read."""
    found: list[dict[str, Any]] = []
    for event in read_events(path, _KINDS, LAST_BYTES):
        if event["event"] == "run_started":
            found = []
        elif isinstance(event.get("rank"), int):
            found.append(event)
    return found


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of a file: `file` is relative to the workspace, `line` counts from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def line_of_failure(failure: FailureRecord | None, code: CodeRecord | None, workspace: Path) -> SourceLine | None:
    """Return the last line of the traceback that is a file in the workspace and no installed package; else None.

    code: the project as it was uploaded; files of the upload are found in the folder that they come from.
    """
    frames = _FRAME.findall(failure.traceback) if failure is not None else []
    for file, line in reversed(frames):
        if found := _in_workspace(_original(file, code), workspace):
            return SourceLine(found, int(line))
    return None


def line_of_problem(problem: Problem, workspace: Path, folder: Path) -> SourceLine | None:
    """Return the line of a configuration that a problem is at; `folder` is the one that its path is relative to."""
    match = _PLACE.fullmatch(problem.where)
    found = _in_workspace(str(folder / match[1]), workspace) if match else ""
    return SourceLine(found, int(match[2])) if match and found else None


def _original(file: str, code: CodeRecord | None) -> str:
    if code is None or not code.hash or not code.folder:
        return file
    _, found, rest = file.partition(f"/{code.hash}/")
    return f"{code.folder}/{rest}" if found else file


def is_installed(file: str) -> bool:
    """Return whether a file of a traceback belongs to ddptrain, the standard library or an installed package."""
    path = Path(file)
    return bool(
        _INSTALLED.search(file) or path.is_relative_to(_PACKAGE) or path.is_relative_to(_STANDARD) or "<frozen" in file
    )


def _in_workspace(file: str, workspace: Path) -> str:
    """Return the path relative to the workspace; "" if it is elsewhere, or not the user's code."""
    path = Path(file)
    try:
        if is_installed(file):
            return ""
        resolved = path.resolve()
        is_there = resolved.is_file()
    except (OSError, ValueError, RuntimeError):  # ValueError: a NUL character; RuntimeError: a circle of links
        return ""
    root = workspace.resolve()
    if not is_there or not resolved.is_relative_to(root):
        return ""
    return str(PurePosixPath(resolved.relative_to(root)))
