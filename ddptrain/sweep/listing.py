"""The sweeps of a folder or an object store, as a table and as JSON data."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ddptrain.results.lookup import parse_time
from ddptrain.sweep.folder import LocalSweeps, open_sweeps
from ddptrain.sweep.output import best_words, sweep_data
from ddptrain.sweep.records import SweepRecord, TrialState
from ddptrain.sweep.stop import SweepTarget, find_target
from ddptrain.text_tables import clean_line, duration

_HEADER = ("SWEEP", "STATUS", "STARTED (UTC)", "DURATION", "TRIALS", "BEST")


@dataclass(frozen=True, slots=True)
class ListedSweep:
    """A sweep of a list. where: its folder or URL. status: `interrupted` if its driver was killed."""

    record: SweepRecord
    where: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON data."""
        record, best = self.record, self.record.find_best()
        return {
            **sweep_data(record, self.where),
            "name": record.name,
            "metric": record.metric,
            "started_at": record.started_at,
            "trials": len(record.trials),
            "ended": record.ended,
            "planned": record.planned,
            "best": asdict(best) if best is not None else None,
        }


def list_sweeps(runs_dir: str, known_runs: Container[str] = ()) -> list[ListedSweep]:
    """Return every sweep of this user, newest first; `known_runs` are no sweeps. Raises UsageError, StoreError."""
    sweeps = open_sweeps(runs_dir)
    place = runs_dir.rstrip("/")
    records = sweeps.list() if isinstance(sweeps, LocalSweeps) else sweeps.list(known_runs)
    return [
        ListedSweep(seen(record, find_target(place, sweep_id)), f"{place}/{sweep_id}")
        for sweep_id, record in records.items()
    ]


def find_listed(runs_dir: str, name: str) -> ListedSweep | None:
    """Return the sweep of that name, path or URL; None if there is none.

    Raises UsageError, StoreError, ResultsError.
    """
    target = find_target(runs_dir, name)
    if target is None:
        return None
    where = name.rstrip("/") if "/" in name else f"{runs_dir.rstrip('/')}/{name}"
    return ListedSweep(seen(target.read(), target), where)


def seen(record: SweepRecord, target: SweepTarget | None) -> SweepRecord:
    """Set the status, and that of running trials, to interrupted if the driver is gone."""
    if record.status == "running" and (target is None or target.holder() is None):
        record.status = "interrupted"
        for trial in record.trials:
            if trial.state is TrialState.RUNNING:
                trial.state = TrialState.INTERRUPTED
    return record


def sweep_table(sweeps: Iterable[ListedSweep]) -> list[tuple[str, ...]]:
    """Return the table for people, with its header."""
    return [_HEADER, *(tuple(map(clean_line, _row(each))) for each in sweeps)]


def _row(sweep: ListedSweep) -> tuple[str, ...]:
    record, started = sweep.record, parse_time(sweep.record.started_at)
    return (
        record.sweep_id,
        record.status,
        f"{started:%Y-%m-%d %H:%M:%S}" if started else "-",
        duration(record.duration_s),
        f"{record.ended} of {record.planned}" if record.planned else str(record.ended),
        best_words(record).removeprefix("best: ") or "-",
    )
