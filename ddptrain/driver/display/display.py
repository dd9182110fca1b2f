"""The display of a run: the driver passes facts to it without waiting; the display's thread shows them.

The thread follows the ranks' log files at its own speed: a slow terminal or pipe delays neither the driver nor the
ranks, and the memory does not grow with the amount of output.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from ddptrain import log
from ddptrain.driver.display.live import LiveRenderer, OtherRows
from ddptrain.driver.display.renderers import JsonRenderer, PlainRenderer, Renderer
from ddptrain.driver.display.summary import evaluation_lines, finished_event, summary_lines
from ddptrain.driver.display.terminal import Stream, choose_mode, format_own, harmless, notice, wants_colour
from ddptrain.results.log_tail import READ_BYTES, LogLine, LogTail

if TYPE_CHECKING:
    from ddptrain.driver.control.debugger import DebuggerTerminal
    from ddptrain.results.run import Run

POLL_S = 0.1
SETTLE_S = 0.02  # the shortest time between two reads, so that a rank's lines come in batches
MAX_WAITING = 50_000  # facts kept while the output is not read; further numbers and lines of our log are dropped
CLOSE_DEADLINE_S = 10.0
MIN_RANKS = 17  # from this number of ranks on, the display shows rank 0, and what other ranks print besides
HOLD_S = 0.4  # how long a line of another rank waits for the same line of rank 0; the display adds at most 0.1 s
MAX_HELD_CHARS = 1 << 20
MAX_KNOWN = 100_000  # lines; after that, equal lines may be shown again
TRACEBACK = "Traceback (most recent call last):"
MAX_TRACEBACK_LINES, MAX_TRACEBACKS = 1000, 100
_LAST_WRITE_S = 0.2
_FEW_LOGS = 64  # up to this number, all logs are checked each time
_ALL_LOGS_S = 2.0


class Display:
    """Shows one run, as a run observer. All methods return at once, even if the terminal blocks, except for the end."""

    def __init__(
        self,
        mode: str,
        logs_dir: Path,
        run_id: str,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        environ: Mapping[str, str] = os.environ,
        *,
        all_ranks: bool = False,
        stage: str = "",
        rows: OtherRows | None = None,
        elapsed_s: float = 0.0,
        debugger: DebuggerTerminal | None = None,
    ) -> None:
        """Start a display that follows logs_dir/rank-<r>.log of every rank, and shows what ddptrain logs to stderr.

        mode: "auto", "live", "plain" or "json"; "live" without a terminal is "plain". From 17 ranks on, rank 0 is shown
        and whatever other ranks print besides, unless `all_ranks`. Each JSON object has the field `stage`, unless it is
        "". `rows` returns other rows than those of the ranks. `elapsed_s`: how long the run has already been running.
        `debugger`: takes the requests of the debugged rank for lines; then there is no live display.
        Raises UsageError for an unknown mode.
        """
        out, err = self._stdout, self._stderr = Stream(stdout or sys.stdout), Stream(stderr or sys.stderr)
        mode = choose_mode(mode if debugger is None else "plain", out.is_terminal, environ)
        colour = wants_colour(out.is_terminal, environ)
        bare = debugger.rank if debugger is not None else None
        self._renderer: Renderer = PlainRenderer(out, err, colour, bare=bare)
        self._debugger = debugger
        self._asked: tuple[int, int] | None = None  # the rank that asks for a line, and the size of its log then
        all_ranks = all_ranks or debugger is not None
        if mode == "json":
            self._renderer = JsonRenderer(out, err, stage)
        elif mode == "live":
            self._renderer = LiveRenderer(out, err, colour, run_id, all_ranks=all_ranks, rows=rows, elapsed_s=elapsed_s)
        self._logs_dir, self._groups_ranks = logs_dir, not all_ranks and mode != "json"
        self._summary = evaluation_lines if stage else summary_lines
        self._lines = ShownLines()
        self._tails: dict[int, LogTail] = {}
        self._bars: dict[
            int, tuple[str, float]
        ] = {}  # redrawn lines: the state that is shown, and when the next is due
        self._hidden: Collection[int] = ()
        self._inbox: deque[Mapping[str, Any] | str] = deque()  # events and lines of our log
        self._grown: deque[int] = deque()  # ranks whose logs have grown
        self._all_read_s = 0.0
        self._dropped = 0
        self._wake, self._aborted = threading.Event(), threading.Event()
        self._end: tuple[Sequence[str], Mapping[str, Any]] | None = None  # set by `close`
        self._failed = ""
        self._thread = threading.Thread(target=self._run, name="ddptrain-display", daemon=True)
        self._thread.start()
        log.divert(self._log_line)

    @property
    def broken(self) -> bool:
        """Whether nothing can be shown any more: the reader has closed stdout, or the display itself has failed."""
        return bool(self._stdout.broken or self._failed)

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
        self.on_event({"event": "notice", "time_s": round(time.time(), 3), "level": level, "message": text})

    def on_end(self, run: Run) -> None:
        """Show every log up to its size now, and the end of the run."""
        self.close(self._summary(run), finished_event(run))

    def close(
        self,
        summary: Sequence[str] = (),
        last_event: Mapping[str, Any] | None = None,
        deadline_s: float = CLOSE_DEADLINE_S,
    ) -> None:
        """Show every log up to its size now, then the summary or last event.

        Stop, with a message on stderr, when nothing could be read or written for `deadline_s` seconds.
        """
        if self._end is None:
            self._end = summary, last_event or {}
            self._wake.set()
            self._join(deadline_s)
            if self.broken:  # stdout is not read, but the user should see how the run ended
                self._write_last(summary)

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
        moved, since_s = -1, time.monotonic()
        try:
            while self._thread.is_alive():
                self._thread.join(POLL_S)
                reads = sum(tail.offset for tail in self._tails.values())
                now = self._stdout.sent_bytes + self._stderr.sent_bytes + reads
                if now != moved:
                    moved, since_s = now, time.monotonic()
                elif time.monotonic() - since_s > deadline_s:
                    self._aborted.set()
                    text = f"nobody has read the output for {deadline_s:g} s; the rest is in {self._logs_dir}"
                    self._write_last(notice(text))
                    return
        except BaseException:  # a second Ctrl-C: the user doesn't want to wait
            self._aborted.set()
            raise

    def _write_last(self, lines: Sequence[str]) -> None:
        self._stderr.write(format_own(lines, False), _LAST_WRITE_S)

    # --- the display's thread ---

    def _run(self) -> None:
        try:
            is_closing = False
            while not (is_closing or self._stdout.broken or self._aborted.is_set()):
                is_closing = self._end is not None  # before the logs: all that was printed before close() is shown
                self._deliver()
                longest = self._read_logs(all_of_them=is_closing)
                now_s = time.monotonic()
                self._show_held(now_s)
                self._renderer.refresh(now_s)
                if longest < READ_BYTES and self._end is None:
                    time.sleep(SETTLE_S)
                    self._wake.wait(POLL_S)
                    self._wake.clear()
            self._finish()
        except Exception as error:  # a display that fails must not end the training
            self._failed = f"{type(error).__name__}: {error}"
            text = f"the display failed ({self._failed}); the run continues, its logs are in {self._logs_dir}"
            self._write_last(notice(text))
        finally:
            log.divert(None)

    def _deliver(self) -> None:
        """Show what has arrived; before a notice, for example of a failure, the ranks' lines that are held."""
        for _ in range(len(self._inbox)):
            match what := self._inbox.popleft():
                case str():
                    self._renderer.log_line(what)
                    continue
                case {"event": "message"}:
                    what = {**what, "event": "notice", "time_s": round(time.time(), 3)}
                case {"event": "ranks", "count": count, "offsets": offsets, "hidden": hidden}:
                    self._follow(count, offsets)
                    self._hidden = hidden
                case {"event": "asks_for_line", "rank": rank, "log_size": size}:
                    self._asked = rank, size
                    continue
            if what["event"] == "notice":
                self._show_held()
            self._renderer.event(what)

    def _follow(self, world_size: int, offsets: Mapping[int, int]) -> None:
        """Follow the logs of these ranks; show the rest of the others."""
        self._show_held()
        for rank in [rank for rank in self._tails if rank >= world_size]:
            self._finish_log(rank, self._tails[rank])
        before = self._tails
        self._tails = {
            rank: before.get(rank) or LogTail(self._logs_dir / f"rank-{rank}.log", offset=offsets.get(rank, 0))
            for rank in range(world_size)
        }
        self._lines = ShownLines(groups=self._groups_ranks and world_size >= MIN_RANKS)

    def _read_logs(self, *, all_of_them: bool) -> int:
        """Show the next piece of each log: with many ranks of those that have grown, and every 2 s of all.

        Return the size in bytes of the longest piece.
        """
        now_s, longest = time.monotonic(), 0
        if self._debugger is not None and self._debugger.reading and not (all_of_them or self._asked):
            return 0  # other output would stand in the line that the user types
        grown = {self._grown.popleft() for _ in range(len(self._grown))}
        if all_of_them or len(self._tails) <= _FEW_LOGS or now_s - self._all_read_s > _ALL_LOGS_S:
            self._all_read_s = now_s
            grown = set(self._tails)
        for rank in sorted(grown & self._tails.keys()):
            size = self._read(rank, self._tails[rank])
            if size == READ_BYTES or self._bars.get(rank):
                self._grown.append(rank)
            longest = max(longest, size)
        if self._asked is not None and self._debugger is not None:
            self._ask(self._debugger, *self._asked)
        return longest

    def _ask(self, debugger: DebuggerTerminal, rank: int, size: int) -> None:
        """Let the user type a line if the log of the rank has been shown up to `size`; its last line is the prompt."""
        tail = self._tails.get(rank)
        if tail is not None and tail.offset < size:
            self._wake.set()  # the rest is on its way
            return
        self._asked = None
        self._show_held()
        prompt = "".join(line.text for line in tail.rest()) if tail is not None else ""
        debugger.ask(harmless(prompt) if self._stdout.is_terminal else prompt)

    def _read(self, rank: int, tail: LogTail) -> int:
        before = tail.offset
        with suppress(OSError):  # it can't be read now
            self._show_lines(rank, tail.read())
        self._show_bar(rank, tail.redrawn)
        return tail.offset - before

    def _show_bar(self, rank: int, state: str) -> None:
        """Show the state of a line that the rank redraws, now and then; a bar that ends soon only at its end."""
        now_s = time.monotonic()
        due_s = now_s + self._renderer.redraw_every_s
        shown, at_s = self._bars.setdefault(rank, ("", due_s)) if state else self._bars.pop(rank, ("", due_s))
        is_shown = rank not in self._hidden and not (self._lines.groups and rank)
        if is_shown and state != shown and (now_s >= at_s or not state):
            self._bars |= {rank: (state, due_s)} if state else {}
            self._renderer.redrawn(rank, state)

    def _show_lines(self, rank: int, lines: Sequence[LogLine]) -> None:
        if rank not in self._hidden and (shown := self._lines.add(rank, lines, time.monotonic())):
            self._renderer.log(rank, shown)

    def _show_held(self, now_s: float = math.inf) -> None:
        for rank, lines in self._lines.due(now_s):
            self._renderer.log(rank, lines)

    def _finish_log(self, rank: int, tail: LogTail) -> None:
        with suppress(OSError):  # a rank that has printed nothing may have no log
            end = tail.path.stat().st_size
            while tail.offset < end and self._read(rank, tail) and not self._aborted.is_set():
                continue
        self._show_lines(rank, tail.rest())
        self._show_bar(rank, "")

    def _finish(self) -> None:
        """Show the rest at the end, or report why nothing can be shown."""
        if self._end is not None and not self._stdout.broken and not self._aborted.is_set():
            for rank, tail in self._tails.items():
                self._finish_log(rank, tail)
            self._show_held()
            self._deliver()
            if self._dropped:
                text = f"{self._dropped} metrics were not shown: the output was not read"
                self._renderer.event({"event": "notice", "level": "warning", "message": text})
            self._renderer.end(*self._end)
        if self._stdout.broken:
            text = f"stdout can't be written any more ({self._stdout.broken}); the run continues without output"
            self._write_last(notice(f"{text}, its logs are in {self._logs_dir}"))


# --- which lines of ranks are shown: all of them, or of many ranks those of rank 0 and what differs ---


class ShownLines:
    """Passes on all lines, but of a traceback that another rank has printed before only the last one.

    With `groups` those of rank 0, and each line of other ranks that no rank before has printed. The lines of each rank
    keep their order. A line that a rank repeats is shown again, unless another rank was first.
    """

    def __init__(self, *, groups: bool = False) -> None:
        self.groups = groups
        self._open: dict[int, list[LogLine]] = {}  # rank -> a traceback whose last line is missing
        self._tracebacks: dict[tuple[LogLine, ...], int] = {}  # the rank that has printed it first
        self._first: dict[int, int] = {}  # hash of a line -> the rank that has printed it first, or 0
        self._held: deque[tuple[float, int, LogLine]] = deque()
        self._chars = 0

    def add(self, rank: int, lines: Sequence[LogLine], now_s: float) -> Sequence[LogLine]:
        """Add lines that a rank has printed, at a monotonic time in seconds; return those to show now."""
        if not self.groups:
            return [shown for line in lines for shown in self._in_traceback(rank, line)]
        if len(self._first) > MAX_KNOWN:
            self._first.clear()
        if rank == 0:
            self._first.update((hash(line), 0) for line in lines)
            return lines
        self._held.extend((now_s, rank, line) for line in lines)
        self._chars += sum(len(line.text) for line in lines)
        return ()

    def due(self, now_s: float) -> Iterator[tuple[int, Sequence[LogLine]]]:
        """Yield ranks and the lines to show of those that were held long enough; at infinity of all."""
        for rank, lines in itertools.groupby(self._taken(now_s), lambda item: item[0]):
            yield rank, [line for _, line in lines]
        while self._open and now_s == math.inf:
            yield self._open.popitem()

    def _in_traceback(self, rank: int, line: LogLine) -> Sequence[LogLine]:
        """Hold a traceback until its last line, the exception: the first line that is not indented."""
        if (held := self._open.get(rank)) is None:
            if line.text != TRACEBACK:
                return (line,)
            self._open[rank] = [line]
            return ()
        held.append(line)
        if line.text[:1] in ("", " ") and len(held) < MAX_TRACEBACK_LINES:
            return ()
        del self._open[rank]
        if len(self._tracebacks) >= MAX_TRACEBACKS:
            self._tracebacks.clear()
        first = self._tracebacks.setdefault(tuple(held), rank)
        return held if first == rank else [LogLine(f"{line.text} (the traceback is that of rank {first})", line.ended)]

    def _taken(self, now_s: float) -> Iterator[tuple[int, LogLine]]:
        while self._held and (now_s - self._held[0][0] >= HOLD_S or self._chars > MAX_HELD_CHARS):
            _, rank, line = self._held.popleft()
            self._chars -= len(line.text)
            if self._first.setdefault(hash(line), rank) == rank:
                yield rank, line
