"""How each rank of a run ended, from events.jsonl: it failed by itself, or because of another one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.results.lookup import RunView
from ddptrain.results.metrics import LAST_BYTES, read_events
from ddptrain.results.run_record import RankRecord

_PASSED, _FAILED, _STOPPED = "passed", "failed", "stopped"
_KINDS = ("run_started", "fault", "rank_ended")


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
