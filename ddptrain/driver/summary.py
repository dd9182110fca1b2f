"""The last words on a run: a few lines for people, one object for programs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ddptrain.results.record import plain
from ddptrain.results.writer import RunWriter
from ddptrain.wording import counted

if TYPE_CHECKING:
    from ddptrain.driver.verdict import Verdict


def last_event(writer: RunWriter, verdict: Verdict, duration_s: float) -> dict[str, Any]:
    """The last JSON line of --output json, and of events.jsonl."""
    return {
        "event": "run_finished",
        "run_id": writer.run_id,
        "run_dir": writer.layout.where,
        "status": str(verdict.status),
        "exit_code": int(verdict.exit_code),
        "duration_s": round(duration_s, 3),
        "failure": plain(dataclasses.asdict(verdict.failure)) if verdict.failure is not None else None,
    }


def lines(writer: RunWriter, verdict: Verdict, duration_s: float) -> list[str]:
    """What a person reads at the end: how it went, the figures, where everything is."""
    record = writer.record
    ranks = f" on {counted(record.world_size, 'rank')}" if record.world_size else ""  # 0: none came to be
    told = [f"run {writer.run_id} {verdict.status} after {duration_s:.1f} s{ranks}"]
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
