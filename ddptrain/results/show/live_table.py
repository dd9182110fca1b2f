"""Shows a run while it is running: in Jupyter a table that is updated in place, elsewhere the lines of its log."""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from html import escape
from typing import Any

from ddptrain.results.errors import ResultsError
from ddptrain.results.lookup import RunView
from ddptrain.results.metrics import MetricsReader, is_number
from ddptrain.results.recorded_config import params_of
from ddptrain.results.run_record import root_cause
from ddptrain.results.show.log_follower import final_text
from ddptrain.sanitize import sanitized
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
        yield "end" if record.failure.is_order else "failure", root_cause(record.failure)
    yield "directory", view.layout.where


EVERY_S = 1.0
_LINES = 12
_LAST_BYTES = 1 << 16


def in_notebook() -> bool:
    """Return whether this process is the kernel of a Jupyter notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class LiveTable:
    """The table of a run: state, progress, newest metrics, last lines of output; `display` is that of IPython."""

    def __init__(self, view: Callable[[], RunView], every_s: float = EVERY_S) -> None:
        self._view, self._every_s = view, every_s
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._metrics: dict[str, float | None] = {}
        self._reader: MetricsReader | None = None
        self._epoch: float | None = None
        self._epochs: float | None = None
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
        page = self._ipython.HTML(self.html())
        if self._handle is None:
            self._handle = self._ipython.display(page, display_id=True)
        else:
            self._handle.update(page)
        self._next_s = time.monotonic() + self._every_s

    def html(self) -> str:
        """Return the table; texts of the run are escaped."""
        view = self._view()
        try:
            self._read(view)
        except ResultsError as error:  # shown; the run itself may continue
            self.write(f"ddptrain: {error}")
        table = run_table_html(view, self._metrics if view.is_running else {})
        lines = escape("\n".join(self._lines))
        return f"{self._progress()}{table}{f'<pre>{lines}</pre>' if lines else ''}"

    def _read(self, view: RunView) -> None:
        if self._reader is None:
            self._reader = MetricsReader(view.layout.metrics_jsonl, last_bytes=_LAST_BYTES)
            self._epochs = _epochs_of(view)
        for line in self._reader.read():
            if line.rank == 0:
                self._metrics |= line.values
                self._epoch = line.epoch if line.epoch is not None else self._epoch

    def _progress(self) -> str:
        if self._epoch is None or not self._epochs:
            return ""
        done = min(self._epoch, self._epochs)
        return f'<progress value="{done:g}" max="{self._epochs:g}"></progress> epoch {done:g} of {self._epochs:g}'


def _epochs_of(view: RunView) -> float | None:
    """Return the number of epochs, if the workload has a parameter of that name."""
    epochs = params_of(view).get("epochs")
    return epochs if is_number(epochs) and epochs > 0 else None
