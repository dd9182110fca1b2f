"""`ddptrain watch`: shows a run of another process, on the display of `train`, from the files of the run."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from ddptrain.driver.display import Display
from ddptrain.driver.display.summary import exit_code_of
from ddptrain.driver.observers import LIVE
from ddptrain.driver.submit import settling
from ddptrain.errors import ExitCode, UsageError
from ddptrain.protocol.events import Metrics, Progress
from ddptrain.protocol.news import SystemSample
from ddptrain.results.log_tail import LogTail, start_of_last
from ddptrain.results.metrics import MetricsReader, json_object
from ddptrain.results.run import Run
from ddptrain.results.run_record import ProgressRecord, RunStatus, root_cause
from ddptrain.results.runs import Runs
from ddptrain.results.system import parse_line

_LOOK_EVERY_S = 0.5
_EARLIER_EVENTS = 10_000  # lines of events.jsonl in which the last attempt begins
_EARLIER_SAMPLES = 200
_EARLIER_METRICS_BYTES = 1 << 16
_BROKEN_PIPE = 128 + 13


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """lines: how many of each rank's earlier lines are shown. output, all_ranks: as for `train`."""

    output: str = "auto"
    lines: int = 10
    all_ranks: bool = False


def watch(runs: Runs, view: Run, options: WatchOptions) -> int:
    """Show a run until it has ended, and then its end; return its exit code. 130: Ctrl-C has ended the watching.

    Raises UsageError if run.json can't be read; StoreError.
    """
    look = settling(view.follow("logs/*", "*.jsonl"))

    def current() -> Run:
        found = look()
        if found.problem:
            raise UsageError(found.problem)
        return found

    view = current()
    elapsed_s = view.duration_s or 0.0
    with Display(
        options.output, view.logs_dir, view.run_id, all_ranks=options.all_ranks, elapsed_s=elapsed_s
    ) as display:
        try:
            feed = _Feed(view, display, options.lines)
            feed.update(view)
            told = ""
            while view.goes_on and not display.broken:
                if (why := _why_queued(view)) not in ("", told):
                    told = why
                    display.notice(f"run {view.run_id} is queued: {why}")
                time.sleep(_LOOK_EVERY_S)
                view = current()
                feed.update(view)
        except KeyboardInterrupt:
            display.notice(f"run {view.run_id} goes on; ddptrain stop {view.run_id} would end it")
            return ExitCode.INTERRUPTED
        if view.goes_on:
            return _BROKEN_PIPE
        if cause := root_cause(view.record.failure):
            level = "error" if view.status == RunStatus.FAILED else "warning"
            display.notice(f"run {view.run_id} {view.status_text}: {cause}", level=level)
        display.on_end(view)
    return exit_code_of(view.record)


def _why_queued(view: Run) -> str:
    """Return what a run waits for: slots that others hold, or its job; "" if that is not known."""
    if view.is_running:
        return "" if view.record.queued is None else view.record.queued.description
    return "".join(f"{job.description} is {job.state}" for job in view.record.jobs[-1:] if job.state)


class _Feed:
    """Passes what is new in the files of a run to a display."""

    def __init__(self, run: Run, display: Display, lines: int) -> None:
        self._display = display
        self._offsets = {rank: start_of_last(path, lines) for rank, path in run.logs().items()}
        self._events = LogTail(run.events_jsonl, _EARLIER_EVENTS)
        self._metrics = MetricsReader(run.metrics_jsonl, last_bytes=_EARLIER_METRICS_BYTES)
        self._system = LogTail(run.system_jsonl, _EARLIER_SAMPLES)
        self._world_size = 0
        self._progress: ProgressRecord | None = None
        self._is_first = True

    def update(self, view: Run) -> None:
        """Pass on what is new since the last call; the first call passes on the last attempt."""
        record = view.record
        if record.world_size != self._world_size:
            self._world_size = record.world_size
            ranks = {"event": "ranks", "count": record.world_size, "offsets": self._offsets, "hidden": ()}
            self._display.on_event(ranks)
        events = [event for line in self._events.texts() if (event := json_object(line.encode()))]
        if self._is_first:
            starts = [at for at, event in enumerate(events) if event.get("event") == "run_started"]
            events = events[starts[-1] if starts else 0 :]
            self._is_first = False
        for event in events:
            if event.get("event") not in ("run_finished", *LIVE):  # the caller shows the end
                self._display.on_event(event)
        attempt = record.attempts[-1].attempt if record.attempts else 1
        for row in self._metrics.read():
            if row.attempt == attempt:
                values = {name: math.nan if value is None else value for name, value in row.values.items()}
                step = None if row.step is None else int(row.step)
                self._show_number(row.rank, Metrics(int(row.time_s * 1e9), values, step, row.epoch))
        for text in self._system.texts():
            if (line := parse_line(text.encode())) is not None:
                of_host = line.rank is None
                use, of_ranks = (line.values, {}) if of_host else ({}, {str(line.rank): line.values})
                sample = SystemSample(line.rank or 0, int(line.time_s * 1e9), line.host, use, of_ranks)
                self._display.on_event({"event": "system", "sample": sample})
        if (progress := record.progress) is not None and progress != self._progress:
            self._progress = progress
            for rank, done in progress.ranks.items():
                if rank.isdecimal() and int(rank) < self._world_size:
                    moved = Progress(int(progress.time_s * 1e9), done, progress.total, progress.unit)
                    self._show_number(int(rank), moved)

    def _show_number(self, rank: int, number: Metrics | Progress) -> None:
        self._display.on_event({"event": "numbers", "rank": rank, "numbers": [number]})
