"""The display of a run: the driver passes messages to it without waiting; the display's thread shows them.

The thread follows the ranks' log files at its own speed: a slow terminal or pipe delays neither the driver nor the
ranks, and the memory does not grow with the amount of output.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

from ddptrain import log
from ddptrain.driver.display import output_api, terminal
from ddptrain.driver.display.live import LiveRenderer, LiveRows, RunRows
from ddptrain.driver.display.log_tail import READ_BYTES, LogTail, RankLine
from ddptrain.driver.display.output_stream import Stream
from ddptrain.driver.display.plain import PlainRenderer, format_notice
from ddptrain.protocol.events import Progress
from ddptrain.results.run_record import as_json_data

POLL_S = 0.1
SETTLE_S = 0.02  # the shortest time between two reads, so that a rank's lines come in batches
MAX_WAITING = 50_000  # messages kept while the output is not read; further metrics and log lines are dropped
CLOSE_DEADLINE_S = 10.0
LATE_S = 1.0  # added to the deadline, after which the thread itself stops waiting for late logs
_LAST_WRITE_S = 0.2
_FEW_LOGS = 64  # up to this number, all logs are checked each time, and stay open
_ALL_LOGS_S = 2.0
_MANY = (  # dropped while too many messages wait, and shown with the next message or line
    output_api.RankMetrics,
    output_api.RankProgress,
    output_api.Silence,
    output_api.SystemUse,
    output_api.LogLine,
)
PROGRESS_EVERY_S = 1.0
_ENDED, _PARTIAL = "}", ', "partial": true}'
MIN_RANKS = 17  # from this number of ranks on, the display shows rank 0, and what other ranks print besides
HOLD_S = 0.4  # how long a line of another rank waits for the same line of rank 0; the display adds at most 0.1 s
MAX_HELD_CHARS = 1 << 20
MAX_KNOWN = 100_000  # lines; after that, equal lines may be shown again
TRACEBACK = "Traceback (most recent call last):"
MAX_TRACEBACK_LINES, MAX_TRACEBACKS = 1000, 100


@dataclass(frozen=True, slots=True)
class _Close:
    final_sizes: Mapping[int, int]
    message: output_api.Closing
    deadline_s: float


class Display(output_api.RunDisplay):
    """Shows one run. All methods except `close` return at once, even if the terminal blocks."""

    def __init__(
        self,
        renderer: output_api.Renderer,
        stdout: Stream,
        stderr: Stream,
        logs_dir: Path,
        aborted: threading.Event,
        *,
        groups_ranks: bool = False,
    ) -> None:
        """`groups_ranks`: equal tracebacks are shown once, and of many ranks rank 0 and whatever differs."""
        self._renderer, self._stdout, self._stderr = renderer, stdout, stderr
        self._logs_dir = logs_dir
        self._groups_ranks = groups_ranks
        self._grouper: DifferingLines | None = None
        self._tracebacks = TracebackFilter()
        self._tails: Mapping[int, LogTail] = {}
        self._hidden: Collection[int] = ()
        self._inbox: deque[output_api.Message] = deque()
        self._grown: deque[int] = deque()  # ranks whose logs have grown
        self._unread: set[int] = set()  # ranks of which more can be read or shown
        self._all_read_s = 0.0
        self._dropped = self._dropped_reported = 0
        self._wake, self._aborted = threading.Event(), aborted
        self._close: _Close | None = None
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

    def hide(self, ranks: Collection[int]) -> None:
        """Do not show the output of these ranks; their logs are complete."""
        self._hidden = ranks

    def handle(self, message: output_api.Message) -> None:
        """Show the message; metrics, progress and lines of ddptrain's own log only if the output is read."""
        if self.broken:
            return
        if isinstance(message, _MANY) and len(self._inbox) >= MAX_WAITING:
            self._dropped += 1
            return
        self._inbox.append(message)
        if not isinstance(message, _MANY):
            self.log_grew()

    def log_grew(self, rank: int | None = None) -> None:
        """Note that the log file of this rank has grown and must be read soon; None: any log may have grown."""
        if rank is not None:
            self._grown.append(rank)
        self._wake.set()

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
        if self._close is None:
            message = output_api.Closing(tuple(summary), last_event or {})
            self._close = _Close(final_sizes or {}, message, deadline_s)
            self._wake.set()
            self._join(deadline_s)
            if self.broken:  # stdout is not read, but the user should see how the run ended
                self._stderr.write_within("".join(f"{line}\n" for line in summary), _LAST_WRITE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log_line(self, text: str) -> None:
        self.handle(output_api.LogLine(text))
        self.log_grew()

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
        self._stderr.write_within(format_notice(text), _LAST_WRITE_S)

    # The display's thread.

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
        """Show messages and logs until the display is closed and all has been shown, or nothing can be shown."""
        idle_since_s = time.monotonic()
        while not (self._stdout.broken or self._aborted.is_set()):
            close = self._close  # read before the logs: all that was printed before close() is then shown
            if close:
                self._set_ends(close.final_sizes)
            self._deliver()
            longest = self._read_logs()
            now_s = time.monotonic()
            if self._grouper is not None:
                self._show(self._grouper.due(now_s))
            self._renderer.refresh(now_s)
            idle_since_s = now_s if longest or not close else idle_since_s
            if close and (self._is_drained() or now_s - idle_since_s > close.deadline_s):
                return
            if longest < READ_BYTES:
                self._pause()

    def _pause(self) -> None:
        if not self._close:
            time.sleep(SETTLE_S)
        self._wake.wait(SETTLE_S if self._close else POLL_S)
        self._wake.clear()

    def _set_ends(self, final_sizes: Mapping[int, int]) -> None:
        for rank, tail in self._tails.items():
            if tail.end is None:
                tail.end = final_sizes.get(rank, tail.size())

    def _deliver(self) -> None:
        for _ in range(len(self._inbox)):
            self._pass_on(self._inbox.popleft())
        count = self._dropped - self._dropped_reported
        if count:
            self._dropped_reported += count
            text = f"{count} metrics were not shown: the output was not read"
            self._renderer.handle(output_api.DriverNotice(text, "warning"))

    def _pass_on(self, message: output_api.Message) -> None:
        """Pass a message on. Before a notice, for example of a failure, show the lines that the grouper holds."""
        if isinstance(message, output_api.DriverNotice | output_api.Closing | output_api.WorldSize):
            self._show((self._grouper or self._tracebacks).flush())
        if isinstance(message, output_api.WorldSize):
            self._follow_logs(message)
            is_group = self._groups_ranks and message.world_size >= MIN_RANKS
            self._grouper = DifferingLines() if is_group else None
            self._tracebacks = TracebackFilter()
        self._renderer.handle(message)

    def _follow_logs(self, message: output_api.WorldSize) -> None:
        """Follow the logs of these ranks; show the rest of the others."""
        before, is_large = self._tails, message.world_size > _FEW_LOGS
        self._tails = {
            rank: before.get(rank)
            or LogTail(self._logs_dir / f"rank-{rank}.log", message.offsets.get(rank, 0), keep_open=not is_large)
            for rank in range(message.world_size)
        }
        for rank in before.keys() - self._tails.keys():
            tail = before[rank]
            tail.end = tail.size()
            while lines := tail.read():
                self._show_lines(rank, lines)
            self._finish_log(rank, tail)
            tail.close()

    def _show(self, groups: Iterable[tuple[Sequence[int], Sequence[RankLine]]]) -> None:
        for ranks, lines in groups:
            self._renderer.log(ranks, lines)

    def _show_lines(self, rank: int, lines: Sequence[RankLine]) -> None:
        if rank in self._hidden:
            return
        if self._grouper is not None:
            self._grouper.add(rank, lines, time.monotonic())
        elif shown := self._tracebacks.add(rank, lines) if self._groups_ranks else lines:
            self._renderer.log([rank], shown)

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
            if (
                state is not None and rank not in self._hidden and (self._grouper is None or rank == 0)
            ):  # of a group: rank 0's bar
                self._renderer.handle(output_api.RedrawnLine(rank, state))
        return longest

    def _logs_to_read(self) -> Iterable[int]:
        """Return the ranks whose logs to read: with many ranks those that have grown, and every 2 s all."""
        now_s = time.monotonic()
        ranks, self._unread = self._unread, set()
        ranks.update(self._grown.popleft() for _ in range(len(self._grown)))
        if self._close or len(self._tails) <= _FEW_LOGS or now_s - self._all_read_s > _ALL_LOGS_S:
            self._all_read_s = now_s
            return self._tails
        return sorted(ranks & self._tails.keys())

    def _is_drained(self) -> bool:
        return not self._inbox and all(tail.drained for tail in self._tails.values())

    def _finish(self) -> None:
        """Show the rest at the end, or report why nothing can be shown."""
        if self._close and not self._stdout.broken and not self._aborted.is_set():
            for rank, tail in self._tails.items():
                self._finish_log(rank, tail)
            self._pass_on(self._close.message)
        if self._stdout.broken:
            text = f"stdout can't be written any more ({self._stdout.broken}); the run continues without output"
            self._write_last(f"{text}, its logs are in {self._logs_dir}")

    def _finish_log(self, rank: int, tail: LogTail) -> None:
        if lines := tail.finish():
            self._show_lines(rank, lines)
        self._renderer.handle(output_api.RedrawnLine(rank, ""))
        if not tail.drained:
            text = f"{tail.path} has {tail.offset} of {tail.end} bytes: the rest did not arrive in time"
            self._pass_on(output_api.DriverNotice(text, "warning"))


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
    rows: LiveRows | None = None,
    elapsed_s: float = 0.0,
) -> Display:
    """Start a display that follows logs_dir/rank-<r>.log for every rank; mode is "auto", "live", "plain" or "json".

    Call `expect` when the number of ranks is known. "live" without a terminal is "plain". Ranks in lockstep share a
    row, and from 17 ranks on, rank 0 is shown and whatever other ranks print besides, unless `all_ranks`. Each JSON
    object has the field `stage`, unless it is "". `rows` are shown instead of those of the ranks. `elapsed_s`: how long
    the run has already been running. Raises UsageError for an unknown mode.
    """
    environ = os.environ if environ is None else environ
    aborted = threading.Event()
    out = Stream(stdout or sys.stdout, aborted.is_set)
    err = Stream(stderr or sys.stderr, aborted.is_set)
    colour = terminal.wants_colour(out.is_terminal, environ)
    renderer: output_api.Renderer
    match terminal.choose_mode(mode, out.is_terminal, environ):
        case "json":
            renderer = JsonRenderer(out, err, stage)
        case "plain":
            renderer = PlainRenderer(out, err, colour)
        case _:
            size = functools.partial(terminal.terminal_size, out.fd, environ)
            rows = rows or RunRows(run_id, is_unicode=out.is_unicode, all_ranks=all_ranks)
            renderer = LiveRenderer(out, err, size, colour, rows, elapsed_s)
    groups_ranks = not (all_ranks or isinstance(renderer, JsonRenderer))
    return Display(renderer, out, err, logs_dir, aborted, groups_ranks=groups_ranks).start()


class JsonRenderer:
    """Writes all messages as JSON lines; the last line contains the result of the run. Ranks are never grouped."""

    redraw_every_s = 1.0

    def __init__(self, stdout: Stream, stderr: Stream, stage: str = "") -> None:
        """`stage`: the value of the field `stage` in each object; without it if ""."""
        self._stdout, self._stderr = stdout, stderr
        self._mark = {"stage": stage} if stage else {}
        self._progress: dict[int, Progress] = {}  # not yet written
        self._written_s: dict[int, float] = {}

    def log(self, ranks: Sequence[int], lines: Sequence[RankLine]) -> None:
        """Write one object per line; "partial" marks a line without a newline (yet): a piece, or a redrawn bar."""
        encode = json.encoder.encode_basestring_ascii
        for rank in ranks:
            mark = "".join(f', "{name}": {encode(value)}' for name, value in self._mark.items())
            head = f'{{"event": "log"{mark}, "rank": {rank}, "time_s": {time.time():.3f}, "line": '
            rows = [f"{head}{encode(text)}{_ENDED if ended else _PARTIAL}\n" for text, ended in lines]
            self._stdout.write("".join(rows))

    def handle(self, message: output_api.Message) -> None:
        """Write the message as an object; progress at most once per second for each rank."""
        match message:
            case output_api.RedrawnLine(rank, text) if text:
                self.log([rank], [RankLine(text, ended=False)])
            case output_api.RankProgress(rank, event):
                self._progress[rank] = event
            case output_api.LogLine(text):
                self._stderr.write(f"{text}\n")
            case output_api.Closing(_, last_event):
                self._write_progress(math.inf)
                if last_event:
                    self._write(last_event)
            case output_api.RawEvent(fields):
                self._write(fields)
            case _:
                self._write_other(message)

    def refresh(self, now_s: float) -> None:
        """Write the progress of ranks whose last object is a second old."""
        if self._progress:
            self._write_progress(now_s)

    def _write_other(self, message: output_api.Message) -> None:
        now = round(time.time(), 3)
        match message:
            case output_api.RankMetrics(rank, event):
                self._write(
                    {"event": "metrics", "rank": rank, "time_s": event.time_ns / 1e9, "step": event.step}
                    | {"epoch": event.epoch, "values": dict(event.values)}
                )
            case output_api.RankStarted(rank, host, pid):
                self._write({"event": "rank_started", "rank": rank, "time_s": now, "host": host, "pid": pid})
            case output_api.RankEnded(rank, ok, _):
                self._write({"event": "rank_ended", "rank": rank, "time_s": now, "ok": ok})
            case output_api.DriverNotice(text, level):
                self._write({"event": "notice", "time_s": now, "level": level, "message": text})
            case output_api.DriverStatus(text) if text:
                self._write({"event": "status", "time_s": now, "message": text})
            case _:
                pass

    def _write_progress(self, now_s: float) -> None:
        for rank, event in list(self._progress.items()):
            if now_s - self._written_s.get(rank, -math.inf) >= PROGRESS_EVERY_S:
                del self._progress[rank]
                self._written_s[rank] = now_s
                fields = {"done": event.done, "total": event.total, "unit": event.unit}
                self._write({"event": "progress", "rank": rank, "time_s": event.time_ns / 1e9} | fields)

    def _write(self, fields: Mapping[str, Any]) -> None:
        self._stdout.write(json.dumps(as_json_data({**fields, **self._mark})) + "\n")


class DifferingLines:
    """Passes on all lines of rank 0, and each line of other ranks that no rank before has printed.

    The lines of each rank keep their order. A line that a rank repeats is shown again, unless another rank was first.
    """

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._first: dict[int, int] = {}  # hash of a line -> the rank that has printed it first, or 0
        self._of_first: list[RankLine] = []
        self._held: deque[tuple[float, int, RankLine]] = deque()
        self._chars = 0

    def add(self, rank: int, lines: Sequence[RankLine], now_s: float) -> None:
        """Add lines that a rank has printed, at a monotonic time in seconds."""
        if len(self._first) > MAX_KNOWN:
            self._first.clear()
        if rank == 0:
            self._of_first += lines
            self._first.update((hash(line), 0) for line in lines)
            return
        self._held.extend((now_s, rank, line) for line in lines)
        self._chars += sum(len(line.text) for line in lines)

    def due(self, now_s: float) -> Iterator[tuple[list[int], list[RankLine]]]:
        """Yield the lines to show of those that were held long enough."""
        if self._of_first:
            yield [0], self._of_first
            self._of_first = []
        for rank, lines in itertools.groupby(self._taken(now_s), lambda item: item[0]):
            yield [rank], [line for _, line in lines]

    def flush(self) -> Iterator[tuple[list[int], list[RankLine]]]:
        """Yield everything that is to be shown of what is held."""
        yield from self.due(float("inf"))

    def _taken(self, now_s: float) -> Iterator[tuple[int, RankLine]]:
        while self._held and (now_s - self._held[0][0] >= self._hold_s or self._chars > MAX_HELD_CHARS):
            _, rank, line = self._held.popleft()
            self._chars -= len(line.text)
            if self._first.setdefault(hash(line), rank) == rank:
                yield rank, line


class TracebackFilter:
    """Replaces a traceback that another rank has printed already by its last line, for runs that are not grouped."""

    def __init__(self) -> None:
        self._open: dict[int, list[RankLine]] = {}  # rank -> the lines of a traceback whose last line is missing
        self._first: dict[tuple[RankLine, ...], int] = {}  # traceback -> the rank that has printed it first

    def add(self, rank: int, lines: Sequence[RankLine]) -> list[RankLine]:
        """Return the lines to show of those that a rank has printed."""
        shown: list[RankLine] = []
        for line in lines:
            held = self._open.get(rank)
            if held is None:
                if line.text == TRACEBACK:
                    self._open[rank] = [line]
                else:
                    shown.append(line)
                continue
            held.append(line)
            if line.text[:1] in ("", " ") and len(held) < MAX_TRACEBACK_LINES:
                continue  # a frame; the exception is the first line that is not indented
            del self._open[rank]
            if len(self._first) >= MAX_TRACEBACKS:
                self._first.clear()
            first = self._first.setdefault(tuple(held), rank)
            same = RankLine(f"{line.text} (the traceback is that of rank {first})", line.ended)
            shown += held if first == rank else [same]
        return shown

    def flush(self) -> Iterator[tuple[list[int], list[RankLine]]]:
        """Yield everything that is held."""
        while self._open:
            rank, held = self._open.popitem()
            yield [rank], held
