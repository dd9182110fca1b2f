"""What the log of a CI job gets when a run has ended: an annotation at the user's line, and the last lines of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ddptrain import ci
from ddptrain.ci import CiService
from ddptrain.config.wording import shorten
from ddptrain.errors import one_line
from ddptrain.redact import hide_credentials
from ddptrain.reports.facts import Facts, line_of_problem
from ddptrain.sanitize import sanitized

_MOST_ANNOTATIONS = 10  # of one step that GitHub keeps
_MESSAGE_CHARACTERS = 2000


def job_log(facts: Facts, service: CiService, workspace: Path, folder: Path) -> str:
    """Return the lines for the log of the job; `folder` is the one that paths of configurations are relative to."""
    sections = "".join(_tail(facts, rank) for rank in facts.tails)
    if service is CiService.GITHUB:
        return sections + "".join(f"{line}\n" for line in _annotations(facts, workspace, folder))
    return sections + (f"ddptrain: error at {facts.source}: {_message(facts)}\n" if facts.source is not None else "")


def _tail(facts: Facts, rank: int) -> str:
    """Return the last lines of a failed rank."""
    lines = "".join(f"[rank {rank}] {sanitized(line)}\n" for line in facts.tails[rank])
    return f"last lines of rank {rank}:\n{lines}"


def _annotations(facts: Facts, workspace: Path, folder: Path) -> Iterator[str]:
    report = facts.report
    for problem in report.problems[:_MOST_ANNOTATIONS]:
        place = line_of_problem(problem, workspace, folder)
        text = f"{problem.key}: {problem.message}" if problem.key else problem.message
        title = "ddptrain: the configuration is wrong"
        file, line = (place.file, place.line) if place is not None else ("", 0)
        message = text if place is not None else f"{problem.where}: {text}"
        yield ci.annotation("error", _safe(message), title=title, file=file, line=line)
    if not report.problems and report.level:
        title = _safe(f"ddptrain: {report.model or report.name} {report.status}")
        file, line = (facts.source.file, facts.source.line) if facts.source is not None else ("", 0)
        yield ci.annotation(report.level, _message(facts), title=title, file=file, line=line)


def _message(facts: Facts) -> str:
    return _safe(facts.report.cause or f"exit code {facts.report.exit_code}")


def _safe(text: str) -> str:
    return shorten(sanitized(hide_credentials(one_line(text))), _MESSAGE_CHARACTERS)
