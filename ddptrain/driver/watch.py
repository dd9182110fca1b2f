"""`ddptrain watch`: shows a run of another process, on the display of `train`, from the files of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddptrain.driver.display import open_display, output_api
from ddptrain.driver.display.run_summary import exit_code_of, past_run_event, past_run_lines
from ddptrain.errors import ExitCode, UsageError
from ddptrain.protocol.events import Metrics, Progress
from ddptrain.protocol.worker_notices import SystemSample
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView, load_run
from ddptrain.results.metrics import MetricsReader, json_object
from ddptrain.results.run_record import BestRecord, ProgressRecord, RunStatus
from ddptrain.results.runs import RunsDir
from ddptrain.results.show.log_follower import LogCursor, start_of_last
from ddptrain.results.system import SystemLine, parse_line

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


def watch(runs: RunsDir, view: RunView, options: WatchOptions) -> int:
    """Show a run until it has ended, and then its end; return its exit code. 130: Ctrl-C has ended the watching.

    Raises UsageError if run.json can't be read; StoreError.
    """
    download, layout = runs.follow(view, None, numbers=True), view.layout

    def current() -> RunView:
        if download is not None:
            download()
        found = load_run(layout.root)
        if found.problem:
            raise UsageError(found.problem)
        return found

    view = current()
    elapsed_s = view.duration_s or 0.0
    with open_display(
        options.output, layout.logs_dir, view.run_id, all_ranks=options.all_ranks, elapsed_s=elapsed_s
    ) as display:
        try:
            feed = _Feed(layout, display, options.lines)
            feed.update(view)
            while view.is_running and not display.broken:
                time.sleep(_LOOK_EVERY_S)
                view = current()
                feed.update(view)
        except KeyboardInterrupt:
            display.notice(f"run {view.run_id} goes on; ddptrain stop {view.run_id} would end it")
            return ExitCode.INTERRUPTED
        if view.is_running:
            return _BROKEN_PIPE
        if cause := _cause(view):
            level = "error" if view.status == RunStatus.FAILED else "warning"
            display.notice(f"run {view.run_id} {view.status_text}: {cause}", level=level)
        display.close(None, past_run_lines(view), past_run_event(view))
    return exit_code_of(view.record)


def _cause(view: RunView) -> str:
    failure = view.record.failure
    if failure is None:
        return ""
    return failure.line if failure.rank is None else f"rank {failure.rank} on {failure.host}: {failure.line}"


class _Feed:
    """Passes what is new in the files of a run to a display."""

    def __init__(self, layout: RunLayout, display: output_api.RunDisplay, lines: int) -> None:
        self._display = display
        self._offsets = {rank: start_of_last(path, lines) for rank, path in layout.logs().items()}
        self._events = LogCursor(layout.events_jsonl, _EARLIER_EVENTS)
        self._metrics = MetricsReader(layout.metrics_jsonl, last_bytes=_EARLIER_METRICS_BYTES)
        self._system = LogCursor(layout.system_jsonl, _EARLIER_SAMPLES)
        self._samples: dict[str, SystemSample] = {}
        self._world_size = 0
        self._progress: ProgressRecord | None = None
        self._is_first = True

    def update(self, view: RunView) -> None:
        """Pass on what is new since the last call; the first call passes on the last attempt."""
        record = view.record
        if record.world_size != self._world_size:
            self._world_size = record.world_size
            self._display.expect(record.world_size, self._offsets)
        events = [event for line in self._events.read() if (event := json_object(line.encode()))]
        if self._is_first:
            starts = [at for at, event in enumerate(events) if event.get("event") == "run_started"]
            events = events[starts[-1] if starts else 0 :]
            self._is_first = False
        for event in events:
            self._show(event, record.best)
        attempt = record.attempts[-1].attempt if record.attempts else 1
        for line in self._metrics.read():
            if line.attempt == attempt:
                values = {name: math.nan if value is None else value for name, value in line.values.items()}
                step = None if line.step is None else int(line.step)
                logged = Metrics(int(line.time_s * 1e9), values, step, line.epoch)
                self._display.handle(output_api.RankMetrics(line.rank, logged))
        for text in self._system.read():
            if (measured := parse_line(text.encode())) is not None:
                self._show_use(measured)
        if record.progress is not None and record.progress != self._progress:
            self._progress = record.progress
            self._show_progress(record.progress)

    def _show(self, event: Mapping[str, Any], best: BestRecord | None) -> None:
        text, rank = str(event.get("message", "")), event.get("rank")
        if not (isinstance(rank, int) and 0 <= rank < self._world_size):
            rank = -1  # another program may have written the file
        match event.get("event"):
            case "epochs" if isinstance(total := event.get("total"), int):
                self._display.handle(output_api.Epochs(total))
            case "checkpoint_saved" if isinstance(step := event.get("step"), int):
                at = event.get("time_s")
                self._display.handle(output_api.Saved(step, at if isinstance(at, float) else time.time(), best))
                self._display.event(event)
            case "notice":
                self._display.notice(text, str(event.get("level")))
            case "status":
                self._display.status(text)
            case "rank_started" if rank >= 0:
                host, pid = str(event.get("host", "")), event.get("pid")
                self._display.handle(output_api.RankStarted(rank, host, pid if isinstance(pid, int) else 0))
            case "rank_ended" if rank >= 0:
                ended = output_api.RankEnded(rank, event.get("ok") is True, event.get("stopped") is True)
                self._display.handle(ended)
            case "run_finished":
                pass  # the caller shows the end
            case _:
                self._display.event(event)

    def _show_use(self, line: SystemLine) -> None:
        """Show a line of system.jsonl together with the last one of its host."""
        last = self._samples.get(line.host)
        use, ranks = (last.use, last.ranks) if last is not None else ({}, {})
        if line.rank is None:
            use = line.values
        else:
            ranks = {**ranks, str(line.rank): line.values}
        self._samples[line.host] = SystemSample(1, line.rank or 0, int(line.time_s * 1e9), line.host, use, ranks)
        self._display.handle(output_api.SystemUse(self._samples[line.host]))

    def _show_progress(self, progress: ProgressRecord) -> None:
        for rank, done in progress.ranks.items():
            if rank.isdecimal() and int(rank) < self._world_size:
                event = Progress(int(progress.time_s * 1e9), done, progress.total, progress.unit)
                self._display.handle(output_api.RankProgress(int(rank), event))
