"""Shows a sweep: a row for each running trial on a terminal, a line for each trial elsewhere, or JSON objects."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddptrain import text_tables
from ddptrain.config.wording import counted
from ddptrain.results.run import time_text
from ddptrain.results.sweep_record import FoundSweep, SweepRecord, TrialRecord, TrialState

_MOST_ROWS = 20  # of the table at the end
_MOST_CHARS = 24  # of a value in the table


@dataclass(frozen=True, slots=True)
class RunningTrial:
    """A trial that runs, its progress, and its status; "" while it trains."""

    record: TrialRecord
    done: float | None
    total: float | None
    status: str = ""


def live_rows(
    sweep: SweepRecord, trials: Sequence[RunningTrial], status: str, elapsed_s: float, height: int
) -> list[str]:
    """Return the rows of the live display: one for each running trial, and one for the sweep."""
    room = max(height // 2 - 1, 1)
    shown = [_running_row(trial, sweep.metric) for trial in trials[:room]]
    more = f", {len(trials) - room} more run" if len(trials) > room else ""
    parts = [status, text_tables.duration(elapsed_s), ended_words(sweep) + more, best_words(sweep)]
    parts.append(_left(sweep, len(trials), elapsed_s))
    return [*shown, " · ".join(part for part in parts if part)]


def trial_event(kind: str, record: TrialRecord) -> dict[str, Any]:
    """Return the object for --output json: "trial_started" or "trial_ended"."""
    return {"event": kind, "time_s": round(time.time(), 3), **dataclasses.asdict(record)}


def last_event(record: SweepRecord, where: str) -> dict[str, Any]:
    """Return the last object for --output json; `where` is the folder or URL of the sweep."""
    return {"event": "sweep_finished", "time_s": round(time.time(), 3), **sweep_data(record, where)}


def sweep_data(record: SweepRecord, where: str) -> dict[str, Any]:
    """Return what JSON output has about a sweep; `where` is its folder or URL."""
    best = record.find_best()
    return {
        "sweep_id": record.sweep_id,
        "sweep_dir": where,
        "status": record.status,
        "exit_code": record.exit_code,
        "message": record.message,
        "duration_s": record.duration_s,
        "best": trial_event("trial", best) if best is not None else None,
        "best_yaml": f"{where}/best.yaml" if best is not None else None,
    }


def listed_data(found: FoundSweep) -> dict[str, Any]:
    """Return what a list of sweeps has about one as JSON data."""
    record, best = found.record, found.record.find_best()
    return {
        **sweep_data(record, found.where),
        "name": record.name,
        "metric": record.metric,
        "started_at": record.started_at,
        "trials": len(record.trials),
        "ended": record.ended,
        "planned": record.planned,
        "best": dataclasses.asdict(best) if best is not None else None,
    }


def sweep_table(sweeps: Iterable[FoundSweep]) -> list[tuple[str, ...]]:
    """Return the list of sweeps for people, with its header."""
    table: list[tuple[str, ...]] = [("SWEEP", "STATUS", "STARTED (UTC)", "DURATION", "TRIALS", "BEST")]
    for record in (found.record for found in sweeps):
        row = (
            record.sweep_id,
            record.status,
            time_text(record.started_at) or "-",
            text_tables.duration(record.duration_s),
            f"{record.ended} of {record.planned}" if record.planned else str(record.ended),
            best_words(record).removeprefix("best: ") or "-",
        )
        table.append(tuple(map(text_tables.clean_line, row)))
    return table


def trial_line(record: TrialRecord, sweep: SweepRecord) -> str:
    """Return the line about a trial that has ended."""
    known = record.value is not None and math.isfinite(record.value)
    value = f"{sweep.metric} {text_tables.number(record.value)}" if known else ""
    took = text_tables.duration(record.duration_s)
    error = text_tables.clean_line(record.error)
    parts = [
        f"trial {record.number} {record.state}",
        value,
        point_words(record.params),
    ]
    parts += [error] if error else []
    return f"{': '.join(filter(None, parts))} ({took})"


def ended_notice(record: TrialRecord, sweep: SweepRecord) -> tuple[str, str]:
    """Return the notice about a trial that has ended, and its level."""
    mark = ", the best so far" if sweep.find_best() is record else ""
    return trial_line(record, sweep) + mark, "error" if record.state is TrialState.FAILED else "info"


def point_words(params: Mapping[str, Any]) -> str:
    """Return a point as text."""
    return ", ".join(f"{name.partition('.')[2]} {_cell(value)}" for name, value in params.items())


def best_words(sweep: SweepRecord) -> str:
    """Return the best trial so far as text."""
    best = sweep.find_best()
    return "" if best is None else f"best: trial {best.number}, {sweep.metric} {text_tables.number(best.value)}"


def ended_words(sweep: SweepRecord) -> str:
    """Return how many trials have ended."""
    return f"{sweep.ended} of {counted(sweep.planned, 'trial')}" if sweep.planned else counted(sweep.ended, "trial")


def summary_lines(sweep: SweepRecord, where: str) -> list[str]:
    """Return the text at the end: the best trials as a table, and where the files are."""
    states = [f"{count} {state}" for state in TrialState if (count := sum(t.state is state for t in sweep.trials))]
    ended = ", ".join(states) or "no trial has begun"
    lines = [f"sweep {sweep.sweep_id} {sweep.status} after {text_tables.duration(sweep.duration_s)}: {ended}"]
    lines += [f"  reason {text_tables.clean_line(sweep.message)}"] if sweep.message else []
    lines += _table(sweep).splitlines()
    if best := best_words(sweep):
        lines.append(f"  {best}: {where}/best.yaml")
    lines.append(f"  results {where}")
    return lines


def _table(sweep: SweepRecord) -> str:
    sign = 1 if sweep.mode == "min" else -1
    order = {state: number for number, state in enumerate(TrialState)}
    shown = sorted(sweep.trials, key=lambda t: (order[t.state], t.value is None, sign * (t.value or 0.0), t.number))
    if not shown:
        return ""
    fields = list(sweep.space)
    header = [
        "  TRIAL",
        "STATE",
        sweep.metric,
        "LAST STEP",
        "TIME",
        *(name.partition(".")[2] for name in fields),
    ]
    rows = [header]
    for trial in shown[:_MOST_ROWS]:
        cells = [f"  {trial.number}", str(trial.state), text_tables.number(trial.value)]
        cells += ["-" if trial.step is None else str(trial.step), text_tables.duration(trial.duration_s)]
        rows.append([*cells, *(_cell(trial.params.get(name)) for name in fields)])
    text = text_tables.plain_table(rows)
    more = len(shown) - _MOST_ROWS
    return f"{text}\n  and {more} more, in sweep.json" if more > 0 else text


def _cell(value: Any) -> str:
    text = text_tables.number(value) if isinstance(value, float) else text_tables.clean_line(str(value))
    return text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 3]}..."


def _left(sweep: SweepRecord, running: int, elapsed_s: float) -> str:
    """Return how long the planned trials will take, from the durations of earlier ones."""
    durations = [t.duration_s for t in sweep.trials if t.state.is_final and t.duration_s is not None]
    left_s = []
    if sweep.planned and durations:
        left_s.append(sum(durations) / len(durations) * (sweep.planned - sweep.ended) / max(1, running))
    if sweep.for_s is not None:
        left_s.append(max(0.0, sweep.for_s - elapsed_s))
    return f"{text_tables.duration(min(left_s))} left" if left_s and sweep.status == "running" else ""


def _running_row(trial: RunningTrial, metric: str) -> str:
    record = trial.record
    done = f"{trial.done / trial.total:4.0%}" if trial.done is not None and trial.total else ""
    value = "" if record.value is None else f"{metric} {text_tables.number(record.value)} at step {record.step}"
    return " · ".join(filter(None, [f"trial {record.number}", trial.status, done, value, point_words(record.params)]))
