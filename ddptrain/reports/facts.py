"""What all reports of a run show, read from its files once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddptrain.errors import DdptrainError
from ddptrain.redact import hide_credentials, hide_known
from ddptrain.reports.rank_results import RankResult, rank_results
from ddptrain.reports.report import RunReport
from ddptrain.reports.source_line import SourceLine, line_of_failure
from ddptrain.results.lookup import RunView
from ddptrain.results.show.log_follower import show_logs

TAIL_LINES = 30
MOST_RANKS = 4  # whose last lines are shown
_LINE_CHARACTERS = 500
_TAIL_BYTES = 6000  # of one rank, so that a report fits into a comment


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
    for rank in [each.rank for each in failed if different[each.message] == each.rank][:MOST_RANKS]:
        try:
            lines = list(show_logs(view, rank, TAIL_LINES))
        except DdptrainError:  # it has no log, or one that cannot be read
            continue
        shown = [_shortened(hide_credentials(hide_known(line, report.secrets))) for line in lines]
        tails[rank] = _last_that_fit(shown)
    return tails


def _last_that_fit(lines: list[str]) -> list[str]:
    room, first = _TAIL_BYTES, len(lines)
    while first > 0 and (room := room - len(lines[first - 1].encode(errors="replace")) - 1) >= 0:
        first -= 1
    return lines[first:]


def _shortened(line: str) -> str:
    return line if len(line) <= _LINE_CHARACTERS else f"{line[:_LINE_CHARACTERS]}..."
