"""The end-of-run summary: lines of text for terminals, a JSON object for programs."""

from __future__ import annotations

import dataclasses
import os
import shlex
from typing import TYPE_CHECKING, Any

from ddptrain.config.wording import counted, shorten
from ddptrain.errors import ExitCode
from ddptrain.results.run_record import RunStatus, as_json_data, status_text
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.time_use import time_use, timed_events

if TYPE_CHECKING:
    from ddptrain.driver.failure.run_end import RunEnd
    from ddptrain.results.layout import RunLayout
    from ddptrain.results.lookup import RunView
    from ddptrain.results.run_record import FailureRecord, RunRecord

_MOST_FIGURES = 20  # of the last metrics; run.json and `ddptrain results show` have all
_MOST_FAILED, _CAUSE_WIDTH = 10, 300
_RUNS_DIR = "runs"  # the default of results.dir, and of --runs-dir


def last_event(writer: RunWriter, run_end: RunEnd, duration_s: float) -> dict[str, Any]:
    """Return the last line of --output json and events.jsonl as an object. Write the use of the time into run.json."""
    spent = time_use(writer.record, timed_events(writer.layout), duration_s)
    writer.update(time_use_s=spent.as_dict(), goodput=spent.goodput)
    return _finished(writer.layout, writer.record, run_end.status, run_end.exit_code, duration_s, run_end.failure)


def past_run_event(view: RunView) -> dict[str, Any]:
    """Return the object of `last_event` for a run that ended earlier."""
    record = view.record
    return _finished(view.layout, record, record.status, exit_code_of(record), view.duration_s or 0.0, record.failure)


def exit_code_of(record: RunRecord) -> int:
    """Return the exit code of a run that has ended; that of a lost cluster if its driver could not write one."""
    return ExitCode.CLUSTER if record.exit_code is None else record.exit_code


def _finished(
    layout: RunLayout,
    record: RunRecord,
    status: str,
    exit_code: int,
    duration_s: float,
    failure: FailureRecord | None,
) -> dict[str, Any]:
    return {
        "event": "run_finished",
        "run_id": layout.root.name,
        "run_dir": layout.where,
        "status": str(status),
        "exit_code": int(exit_code),
        "duration_s": round(duration_s, 3),
        "time_use_s": dict(record.time_use_s),
        "goodput": record.goodput,
        "last_metrics": as_json_data(dict(record.last_metrics)),
        "best": as_json_data(dataclasses.asdict(record.best)) if record.best is not None else None,
        "result": as_json_data(record.result),
        "failure": as_json_data(dataclasses.asdict(failure)) if failure is not None else None,
    }


def summary_lines(writer: RunWriter, run_end: RunEnd, duration_s: float) -> list[str]:
    """Return the lines of the summary: status, metrics, best checkpoint, use of the time, run directory."""
    return _lines(writer.layout, writer.record, run_end.status, run_end.failure, duration_s)


def past_run_lines(view: RunView) -> list[str]:
    """Return the lines of `summary_lines` for a run that ended earlier."""
    return _lines(view.layout, view.record, view.status, view.record.failure, view.duration_s or 0.0)


def _lines(
    layout: RunLayout, record: RunRecord, status: str, failure: FailureRecord | None, duration_s: float
) -> list[str]:
    ranks = f" on {counted(record.world_size, 'rank')}" if record.world_size else ""  # 0: no rank was started
    earlier_s = record.earlier_s
    resumed = f" ({duration_s - earlier_s:.1f} s since it was resumed)" if earlier_s else ""
    how = status_text(status, failure, record.checkpoints)
    text = [f"run {record.run_id} {how} after {duration_s:.1f} s{resumed}{ranks}"]
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
    if (bad := record.not_finite) is not None and status == RunStatus.SUCCEEDED:
        text.append(f"  nan     rank {bad.rank}: {bad.description}")
    spent = time_use(record, timed_events(layout), duration_s).line()
    if spent and record.attempts:
        text.append(f"  time    {spent}")
    text.append(f"  results {layout.where}")
    if status != RunStatus.SUCCEEDED:
        text.append(f"  next    {_next_step(layout, record)}")
    return text


def _next_step(layout: RunLayout, record: RunRecord) -> str:
    """Return the commands for a run that has not succeeded: explain, and resume if it has a checkpoint."""
    place = os.path.dirname(layout.where)
    option = "" if os.path.abspath(place) == os.path.abspath(_RUNS_DIR) else f" --runs-dir {shlex.quote(place)}"
    step = f"ddptrain explain {record.run_id}{option}"
    if not record.checkpoints:
        return step
    return f"{step}; --resume {record.run_id} continues from {record.checkpoints[0]}"


def evaluation_lines(writer: RunWriter, run_end: RunEnd, duration_s: float) -> list[str]:
    """Return the summary of an evaluation, without the run directory, which is removed after a success."""
    world_size = writer.record.world_size
    ranks = f" on {counted(world_size, 'rank')}" if world_size else ""
    return [f"evaluation {run_end.status} after {duration_s:.1f} s{ranks}"]


def _figure(value: float) -> str:
    """Return four significant digits of a small or very large number, else all digits before the point."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
