"""The display of a run: the driver passes facts to it without waiting; the display's thread shows them.

The thread follows the ranks' log files at its own speed: a slow terminal or pipe delays neither the driver nor the
ranks, and the memory does not grow with the amount of output.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from ddptrain import log
from ddptrain.driver.display import terminal
from ddptrain.driver.display.live import LiveRenderer, OtherRows
from ddptrain.driver.display.logs import (
    READ_BYTES,
    AllLines,
    DifferingLines,
    LogTail,
    RankLine,
    RankLines,
    TracebackFilter,
)
from ddptrain.driver.display.renderers import (
    JsonRenderer,
    PlainRenderer,
    Renderer,
    format_notice,
    notice_line,
)
from ddptrain.driver.display.summary import evaluation_lines, finished_event, summary_lines

if TYPE_CHECKING:
    from ddptrain.results.lookup import RunView

POLL_S = 0.1
SETTLE_S = 0.02  # the shortest time between two reads, so that a rank's lines come in batches
MAX_WAITING = 50_000  # facts kept while the output is not read; further numbers and lines of our log are dropped
CLOSE_DEADLINE_S = 10.0
LATE_S = 1.0  # added to the deadline, after which the thread itself stops waiting for late logs
MIN_RANKS = 17  # from this number of ranks on, the display shows rank 0, and what other ranks print besides
_LAST_WRITE_S = 0.2
_FEW_LOGS = 64  # up to this number, all logs are checked each time, and stay open
_ALL_LOGS_S = 2.0


class Display:
    """Shows one run, as a run observer. All methods return at once, even if the terminal blocks, except for the end."""

    def __init__(
        self,
        renderer: Renderer,
        stdout: terminal.Stream,
        stderr: terminal.Stream,
        logs_dir: Path,
        *,
        groups_ranks: bool = False,
        summary: Callable[[RunView], Sequence[str]] = summary_lines,
    ) -> None:
        """`groups_ranks`: equal tracebacks are shown once, and of many ranks rank 0 and whatever differs.

        `summary`: returns the last lines for a run.
        """
        self._summary = summary
        self._renderer, self._stdout, self._stderr = renderer, stdout, stderr
        self._logs_dir = logs_dir
        self._groups_ranks = groups_ranks
        self._lines = AllLines()
        self._tails: Mapping[int, LogTail] = {}
        self._hidden: Collection[int] = ()
        self._inbox: deque[Mapping[str, Any] | str] = deque()  # events and lines of our log
        self._grown: deque[int] = deque()  # ranks whose logs have grown
        self._unread: set[int] = set()  # ranks of which more can be read or shown
        self._all_read_s = 0.0
        self._dropped = self._dropped_reported = 0
        self._wake, self._aborted = threading.Event(), threading.Event()
        self._final_sizes: Mapping[int, int] = {}
        self._deadline_s = CLOSE_DEADLINE_S
        self._end: tuple[Sequence[str], Mapping[str, Any]] | None = None  # set by `close`
        self._failed = ""
        self._thread = threading.Thread(target=self._run, name="ddptrain-display", daemon=True)

    @property
    def broken(self) -> bool:
        """Whether nothing can be shown any more: the reader has closed stdout, or the display itself has failed."""
        return bool(self._stdout.broken or self._failed)

    def start(self) -> Self:
        """Start the display's thread, which also shows what ddptrain logs to stderr."""
        self._thread.start()
        log.divert(self._log_line)
        return self

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Show an event. Numbers of ranks, the use of hosts and silences are left out if the output is not read."""
        match event:
            case {"event": "log_grew", "rank": rank}:
                self._grown.append(rank)
                self._wake.set()
            case {"event": "numbers" | "system" | "silence"}:  # they are shown with the next one, or the next line
                self._put(event, len(event.get("numbers", " ")))
            case _:
                self._put(event)
                self._wake.set()

    def status(self, text: str) -> None:
        """Show what the driver waits for, without a line in events.jsonl."""
        self.on_event({"event": "status", "time_s": round(time.time(), 3), "message": text})

    def notice(self, text: str, level: str = "info") -> None:
        """Show a message, of level "info", "warning" or "error", without a line in events.jsonl."""
        self.on_event(notice_line(text, level))

    def on_end(self, run: RunView) -> None:
        """Show every log up to its size now, and the end of the run."""
        sizes = {rank: path.stat().st_size for rank, path in run.layout.logs().items()}
        self.close(sizes, self._summary(run), finished_event(run))

    def close(
        self,
        final_sizes: Mapping[int, int] | None = None,
        summary: Sequence[str] = (),
        last_event: Mapping[str, Any] | None = None,
        deadline_s: float = CLOSE_DEADLINE_S,
    ) -> None:
        """Show every log up to its final size in bytes (None: its size now), then the summary or last event.

        Stop, with a message on stderr, when nothing could be read or written for `deadline_s` seconds.
        """
        if self._end is None:
            self._final_sizes, self._deadline_s = final_sizes or {}, deadline_s
            self._end = summary, last_event or {}
            self._wake.set()
            self._join(deadline_s)
            if self.broken:  # stdout is not read, but the user should see how the run ended
                self._stderr.write("".join(f"{line}\n" for line in summary), _LAST_WRITE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log_line(self, text: str) -> None:
        self._put(text, 1)
        self._wake.set()

    def _put(self, what: Mapping[str, Any] | str, count: int = 0) -> None:
        """Pass an event or a line of our log to the thread; `count` of something may be dropped."""
        if count and len(self._inbox) >= MAX_WAITING:
            self._dropped += count
        elif not self.broken:
            self._inbox.append(what)

    def _join(self, deadline_s: float) -> None:
        """Wait for the thread as long as it reads or writes anything."""
        moved, since_s = self._moved(), time.monotonic()
        try:
            while self._thread.is_alive():
                self._thread.join(POLL_S)
                if (now := self._moved()) != moved:
                    moved, since_s = now, time.monotonic()
                elif time.monotonic() - since_s > deadline_s + LATE_S:
                    self._aborted.set()
                    self._thread.join(2 * POLL_S)
                    self._write_last(
                        f"nobody has read the output for {deadline_s:g} s; the rest is in {self._logs_dir}"
                    )
                    return
        except BaseException:  # a second Ctrl-C: the user doesn't want to wait
            self._aborted.set()
            raise

    def _moved(self) -> int:
        return self._stdout.sent_bytes + self._stderr.sent_bytes + sum(tail.offset for tail in self._tails.values())

    def _write_last(self, text: str) -> None:
        self._stderr.write(format_notice(text), _LAST_WRITE_S)

    # --- the display's thread ---

    def _run(self) -> None:
        try:
            self._follow()
            self._finish()
        except Exception as error:  # a display that fails must not end the training
            self._failed = f"{type(error).__name__}: {error}"
            self._write_last(
                f"the display failed ({self._failed}); the run continues, its logs are in {self._logs_dir}"
            )
        finally:
            log.divert(None)
            for tail in self._tails.values():
                tail.close()

    def _follow(self) -> None:
        """Show facts and logs until the display is closed and all has been shown, or nothing can be shown."""
        idle_since_s = time.monotonic()
        while not (self._stdout.broken or self._aborted.is_set()):
            if is_closing := self._end is not None:  # before the logs: all that was printed before close() is shown
                for rank, tail in self._tails.items():
                    if tail.end is None:
                        tail.end = self._final_sizes.get(rank, tail.size())
            self._deliver()
            longest = self._read_logs()
            now_s = time.monotonic()
            self._show(self._lines.due(now_s))
            self._renderer.refresh(now_s)
            idle_since_s = now_s if longest or not is_closing else idle_since_s
            is_drained = not self._inbox and all(tail.drained for tail in self._tails.values())
            if is_closing and (is_drained or now_s - idle_since_s > self._deadline_s):
                return
            if longest < READ_BYTES:
                is_closing = self._end is not None
                if not is_closing:
                    time.sleep(SETTLE_S)
                self._wake.wait(SETTLE_S if is_closing else POLL_S)
                self._wake.clear()

    def _deliver(self) -> None:
        for _ in range(len(self._inbox)):
            match what := self._inbox.popleft():
                case str():
                    self._renderer.log_line(what)
                case {"event": "message", "message": text, "level": level}:
                    self._event(notice_line(text, level))
                case _:
                    self._event(what)
        if count := self._dropped - self._dropped_reported:
            self._dropped_reported += count
            text = f"{count} metrics were not shown: the output was not read"
            self._renderer.event(notice_line(text, "warning"))

    def _event(self, event: Mapping[str, Any]) -> None:
        """Show the event; before a notice, for example of a failure, the ranks' lines that are held."""
        match event:
            case {"event": "ranks", "count": count, "offsets": offsets, "hidden": hidden}:
                self._follow_ranks(count, offsets)
                self._hidden = hidden
            case {"event": "notice"}:
                self._show(self._lines.flush())
        self._renderer.event(event)

    def _follow_ranks(self, world_size: int, offsets: Mapping[int, int]) -> None:
        """Follow the logs of these ranks; show the rest of the others."""
        self._show(self._lines.flush())
        before, is_large = self._tails, world_size > _FEW_LOGS
        self._tails = {
            rank: before.get(rank)
            or LogTail(self._logs_dir / f"rank-{rank}.log", offsets.get(rank, 0), keep_open=not is_large)
            for rank in range(world_size)
        }
        for rank in before.keys() - self._tails.keys():
            tail = before[rank]
            tail.end = tail.size()
            while lines := tail.read():
                self._show_lines(rank, lines)
            self._finish_log(rank, tail)
            tail.close()
        if self._groups_ranks:
            self._lines = DifferingLines() if world_size >= MIN_RANKS else TracebackFilter()

    def _show(self, held: Iterable[RankLines]) -> None:
        for rank, lines in held:
            self._renderer.log(rank, lines)

    def _show_lines(self, rank: int, lines: Sequence[RankLine]) -> None:
        if rank not in self._hidden:
            self._show(self._lines.add(rank, lines, time.monotonic()))

    def _read_logs(self) -> int:
        """Show the next piece of every log; return the size in bytes of the longest piece."""
        longest = 0
        for rank in self._logs_to_read():
            tail = self._tails[rank]
            before = tail.offset
            if lines := tail.read():
                self._show_lines(rank, lines)
            longest = max(longest, tail.offset - before)
            if tail.offset - before == READ_BYTES or tail.is_redrawn:
                self._unread.add(rank)
            state = tail.redrawn(time.monotonic(), self._renderer.redraw_every_s)
            if state is not None and rank not in self._hidden and self._lines.only_bar_of in (None, rank):
                self._renderer.redrawn(rank, state)
        return longest

    def _logs_to_read(self) -> Iterable[int]:
        """Return the ranks whose logs to read: with many ranks those that have grown, and every 2 s all."""
        now_s = time.monotonic()
        ranks, self._unread = self._unread, set()
        ranks.update(self._grown.popleft() for _ in range(len(self._grown)))
        if self._end or len(self._tails) <= _FEW_LOGS or now_s - self._all_read_s > _ALL_LOGS_S:
            self._all_read_s = now_s
            return self._tails
        return sorted(ranks & self._tails.keys())

    def _finish(self) -> None:
        """Show the rest at the end, or report why nothing can be shown."""
        if self._end is not None and not self._stdout.broken and not self._aborted.is_set():
            for rank, tail in self._tails.items():
                self._finish_log(rank, tail)
            self._show(self._lines.flush())
            self._renderer.end(*self._end)
        if self._stdout.broken:
            text = f"stdout can't be written any more ({self._stdout.broken}); the run continues without output"
            self._write_last(f"{text}, its logs are in {self._logs_dir}")

    def _finish_log(self, rank: int, tail: LogTail) -> None:
        if lines := tail.finish():
            self._show_lines(rank, lines)
        self._renderer.redrawn(rank, "")
        if not tail.drained:
            text = f"{tail.path} has {tail.offset} of {tail.end} bytes: the rest did not arrive in time"
            self._event(notice_line(text, "warning"))


def open_display(
    mode: str,
    logs_dir: Path,
    run_id: str,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    all_ranks: bool = False,
    stage: str = "",
    rows: OtherRows | None = None,
    elapsed_s: float = 0.0,
) -> Display:
    """Start a display that follows logs_dir/rank-<r>.log for every rank; mode is "auto", "live", "plain" or "json".

    "live" without a terminal is "plain". Ranks in lockstep share a
    row, and from 17 ranks on, rank 0 is shown and whatever other ranks print besides, unless `all_ranks`. Each JSON
    object has the field `stage`, unless it is "". `rows` returns other rows than those of the ranks. `elapsed_s`: how
    long the run has already been running. Raises UsageError for an unknown mode.
    """
    environ = os.environ if environ is None else environ
    out, err = terminal.Stream(stdout or sys.stdout), terminal.Stream(stderr or sys.stderr)
    colour = terminal.wants_colour(out.is_terminal, environ)
    renderer: Renderer
    match terminal.choose_mode(mode, out.is_terminal, environ):
        case "json":
            renderer = JsonRenderer(out, err, stage)
        case "plain":
            renderer = PlainRenderer(out, err, colour)
        case _:
            size = functools.partial(terminal.terminal_size, out.fd, environ)
            renderer = LiveRenderer(out, err, size, colour, run_id, all_ranks=all_ranks, rows=rows, elapsed_s=elapsed_s)
    groups_ranks = not (all_ranks or isinstance(renderer, JsonRenderer))
    lines = evaluation_lines if stage else summary_lines
    return Display(renderer, out, err, logs_dir, groups_ranks=groups_ranks, summary=lines).start()
