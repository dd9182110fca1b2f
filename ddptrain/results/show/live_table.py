"""The table of a run in a Jupyter notebook; while the run is running it is updated in place."""

from __future__ import annotations

import importlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from html import escape
from typing import Any

from ddptrain.results.run import Run
from ddptrain.results.run_record import root_cause
from ddptrain.results.show.log_follower import final_text
from ddptrain.results.show.render import event_sections
from ddptrain.sanitize import sanitized
from ddptrain.text_tables import clean_line, duration, number

_LINES = 12
_LAST_BYTES = 1 << 16  # of events.jsonl


def in_notebook() -> bool:
    """Return whether this process is the kernel of a Jupyter notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def run_table_html(view: Run) -> str:
    """Return the table; texts of the run are escaped."""
    rows = "".join(
        f"<tr><th>{escape(clean_line(name))}</th><td>{escape(clean_line(text))}</td></tr>" for name, text in _rows(view)
    )
    return f"<table>{rows}</table>"


def _rows(view: Run) -> Iterator[tuple[str, str]]:
    record = view.record
    yield "run", view.run_id
    code = "" if record.exit_code is None or view.goes_on else f" (exit code {record.exit_code})"
    yield "status", f"{view.status_text}{code}"
    yield "duration", duration(view.duration_s)
    if record.world_size:
        yield "ranks", str(record.world_size)
    for name, value in record.numbers.items():
        yield name, number(value)
    if record.best is not None:
        yield "best", f"{record.best.metric} {number(record.best.value)} at step {record.best.step}"
    for title, lines in event_sections(view.events_jsonl, _LAST_BYTES):
        yield from ((title, f"{rank}: {text}") for rank, text in lines[-3:])
    if record.failure is not None:
        yield "end" if record.failure.is_order else "failure", root_cause(record.failure)
    yield "directory", view.where


class LiveTable:
    """The table of a run with its progress and the last lines of output; `display` is that of IPython."""

    def __init__(self, view: Callable[[], Run], every_s: float) -> None:
        self._view, self._every_s = view, every_s
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._next_s = 0.0
        self._ipython: Any = importlib.import_module("IPython.display")
        self._handle: Any = None

    def write(self, text: str) -> None:
        """Add lines of output."""
        self._lines.extend(clean_line(sanitized(final_text(line))) for line in text.split("\n") if line.strip())

    def refresh(self, *, now: bool = False) -> None:
        """Show the present state, at most once in `every_s` seconds unless `now`."""
        if not now and time.monotonic() < self._next_s:
            return
        view = self._view()
        lines, progress, bar = escape("\n".join(self._lines)), view.record.progress, ""
        if view.is_running and progress is not None and progress.total:
            bar = f'<progress value="{progress.done:g}" max="{progress.total:g}"></progress> {escape(progress.share)}'
        page = self._ipython.HTML(f"{bar}{run_table_html(view)}{f'<pre>{lines}</pre>' if lines else ''}")
        if self._handle is None:
            self._handle = self._ipython.display(page, display_id=True)
        else:
            self._handle.update(page)
        self._next_s = time.monotonic() + self._every_s
