"""The last words on a run: a few lines for people, one object for programs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ddptrain.config.wording import counted
from ddptrain.results.record import plain
from ddptrain.results.writer import RunWriter

if TYPE_CHECKING:
    from ddptrain.driver.failure.outcome import Verdict
    from ddptrain.results.layout import RunLayout
    from ddptrain.results.lookup import RunView
    from ddptrain.results.record import FailureRecord


def last_event(writer: RunWriter, verdict: Verdict, duration_s: float) -> dict[str, Any]:
    """The last JSON line of --output json, and of events.jsonl."""
    return _finished(writer.layout, verdict.status, verdict.exit_code, duration_s, verdict.failure)


def event_of(view: RunView) -> dict[str, Any]:
    """The same for a run that had ended before."""
    record = view.record
    return _finished(view.layout, record.status, record.exit_code or 0, view.duration_s or 0.0, record.failure)


def _finished(
    layout: RunLayout, status: str, exit_code: int, duration_s: float, failure: FailureRecord | None
) -> dict[str, Any]:
    return {
        "event": "run_finished",
        "run_id": layout.root.name,
        "run_dir": layout.where,
        "status": str(status),
        "exit_code": int(exit_code),
        "duration_s": round(duration_s, 3),
        "failure": plain(dataclasses.asdict(failure)) if failure is not None else None,
    }


def lines(writer: RunWriter, verdict: Verdict, duration_s: float) -> list[str]:
    """What a person reads at the end: how it went, the figures, where everything is."""
    record = writer.record
    ranks = f" on {counted(record.world_size, 'rank')}" if record.world_size else ""  # 0: none came to be
    earlier_s = record.earlier_s
    resumed = f" ({duration_s - earlier_s:.1f} s since it was resumed)" if earlier_s else ""
    told = [f"run {writer.run_id} {verdict.status} after {duration_s:.1f} s{resumed}{ranks}"]
    figures = [f"{name} {_figure(value)}" for name, value in sorted(record.last_metrics.items()) if value is not None]
    if figures:
        told.append(f"  last    {', '.join(figures)}")
    if record.best is not None:
        told.append(f"  best    {record.best.metric} {record.best.value:.4f} at step {record.best.step}")
    told.append(f"  results {writer.layout.where}")
    return told


def _figure(value: float) -> str:
    """Four digits of a small number, all of a large one."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
