"""A run as a small HTML table, for notebooks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape

from ddptrain.errors import one_line
from ddptrain.results.lookup import RunView
from ddptrain.text_tables import clean_line, duration, number


def run_table_html(view: RunView, metrics: Mapping[str, float | None] | None = None) -> str:
    """Return the table; texts of the run are escaped. `metrics`: newer values than those of its record."""
    rows = "".join(
        f"<tr><th>{escape(clean_line(name))}</th><td>{escape(clean_line(text))}</td></tr>"
        for name, text in _rows(view, metrics or {})
    )
    return f"<table>{rows}</table>"


def _rows(view: RunView, metrics: Mapping[str, float | None]) -> Iterator[tuple[str, str]]:
    record = view.record
    yield "run", view.run_id
    code = "" if record.exit_code is None or view.is_running else f" (exit code {record.exit_code})"
    yield "status", f"{view.status_text}{code}"
    yield "duration", duration(view.duration_s)
    if record.world_size:
        yield "ranks", str(record.world_size)
    for name, value in sorted({**record.numbers, **metrics}.items()):
        yield name, number(math.nan if value is None else value)
    if record.best is not None:
        yield "best", f"{record.best.metric} {number(record.best.value)} at step {record.best.step}"
    if record.failure is not None:
        rank = "" if record.failure.rank is None else f"rank {record.failure.rank}: "
        kind = f"{record.failure.type}: " if record.failure.type else ""
        yield "end" if record.failure.is_order else "failure", f"{rank}{kind}{one_line(record.failure.message)}"
    yield "directory", view.layout.where
