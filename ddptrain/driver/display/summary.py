"""The end-of-run summary: lines of text for terminals, a JSON object for programs."""

from __future__ import annotations

import dataclasses
import os
import shlex
from typing import Any

from ddptrain.config.wording import counted, shorten
from ddptrain.errors import ExitCode
from ddptrain.results.run import Run
from ddptrain.results.run_record import RunRecord, RunStatus, as_json_data
from ddptrain.results.time_use import time_use, timed_events

_MOST_FIGURES = 20  # of the last metrics; run.json and `ddptrain results show` have all
_MOST_FAILED, _CAUSE_WIDTH = 10, 300
_RUNS_DIR = "runs"  # the default of results.dir, and of --runs-dir


def finished_event(view: Run) -> dict[str, Any]:
    """Return the end of a run as an object: the last line of --output json and events.jsonl."""
    record = view.record
    return {
        "event": "run_finished",
        "run_id": view.root.name,
        "run_dir": view.where,
        "status": str(record.status),
        "exit_code": int(exit_code_of(record)),
        "duration_s": round(view.duration_s or 0.0, 3),
        "time_use_s": dict(record.time_use_s),
        "goodput": record.goodput,
        "last_metrics": as_json_data(dict(record.last_metrics)),
        "best": as_json_data(dataclasses.asdict(record.best)) if record.best is not None else None,
        "result": as_json_data(record.result),
        "failure": as_json_data(dataclasses.asdict(record.failure)) if record.failure is not None else None,
    }


def exit_code_of(record: RunRecord) -> int:
    """Return the exit code of a run that has ended; that of a lost cluster if its driver could not write one."""
    return ExitCode.CLUSTER if record.exit_code is None else record.exit_code


def summary_lines(view: Run) -> list[str]:
    """Return the lines of the summary: status, metrics, best checkpoint, use of the time, run directory."""
    layout, record, duration_s = view, view.record, view.duration_s or 0.0
    ranks = f" on {counted(record.world_size, 'rank')}" if record.world_size else ""  # 0: no rank was started
    earlier_s = record.earlier_s
    resumed = f" ({duration_s - earlier_s:.1f} s since it was resumed)" if earlier_s else ""
    text = [f"run {record.run_id} {record.status_text} after {duration_s:.1f} s{resumed}{ranks}"]
    failed = record.failed_attempts
    if len(failed) > _MOST_FAILED:
        text.append(f"  failed  {counted(len(failed) - _MOST_FAILED, 'attempt')} before these: see results show")
    text += [f"  failed  {attempt}: {shorten(cause, _CAUSE_WIDTH)}" for attempt, cause in failed[-_MOST_FAILED:]]
    figures = [f"{name} {_figure(value)}" for name, value in sorted(record.last_metrics.items()) if value is not None]
    if figures:
        more = f", and {len(figures) - _MOST_FIGURES:,} more" if len(figures) > _MOST_FIGURES else ""
        text.append(f"  last    {', '.join(figures[:_MOST_FIGURES])}{more}")
    if record.best is not None:
        text.append(f"  best    {record.best.metric} {record.best.value:.4f} at step {record.best.step}")
    if (bad := record.not_finite) is not None and record.status == RunStatus.SUCCEEDED:
        text.append(f"  nan     rank {bad.rank}: {bad.description}")
    spent = time_use(record, timed_events(layout), duration_s).line()
    if spent and record.attempts:
        text.append(f"  time    {spent}")
    text.append(f"  results {layout.where}")
    if record.status not in (RunStatus.SUCCEEDED, RunStatus.QUEUED):  # a queued run continues by itself
        text.append(f"  next    {_next_step(layout, record)}")
    return text


def _next_step(layout: Run, record: RunRecord) -> str:
    """Return the commands for a run that has not succeeded: explain, and resume if it has a checkpoint."""
    place = os.path.dirname(layout.where)
    option = "" if os.path.abspath(place) == os.path.abspath(_RUNS_DIR) else f" --runs-dir {shlex.quote(place)}"
    step = f"ddptrain explain {record.run_id}{option}"
    if not record.checkpoints:
        return step
    return f"{step}; --resume {record.run_id} continues from {record.checkpoints[0]}"


def evaluation_lines(view: Run) -> list[str]:
    """Return the summary of an evaluation, without the run directory, which is removed after a success."""
    record = view.record
    ranks = f" on {counted(record.world_size, 'rank')}" if record.world_size else ""
    return [f"evaluation {record.status} after {view.duration_s or 0.0:.1f} s{ranks}"]


def _figure(value: float) -> str:
    """Return four significant digits of a small or very large number, else all digits before the point."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
