"""What is shown of a run in pipes and for programs: the events of driver/observers.py, and what ranks print."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ddptrain.driver.display.facts import RunFacts
from ddptrain.driver.display.terminal import Stream, format_lines, format_own, notice
from ddptrain.protocol.events import Metrics, Progress
from ddptrain.results.log_tail import LogLine
from ddptrain.results.run_record import as_json_data

QUIET_S = 60.0  # without any line
_ABOUT_EPOCHS = re.compile(r"\bepoch\b|loss\b", re.IGNORECASE)
MANY_EPOCHS, MANY_EVERY_S = 100, 10.0  # of further epochs, at most one line in this time
PROGRESS_EVERY_S = 1.0


class Renderer:
    """One kind of output; only the display's thread calls it."""

    redraw_every_s = 1.0  # seconds between two states of a redrawn line

    def __init__(self, stdout: Stream, stderr: Stream, colour: bool = False) -> None:
        self._stdout, self._stderr, self._colour = stdout, stderr, colour

    def event(self, event: Mapping[str, Any]) -> None:
        """Show a line of events.jsonl, which another program may have written, or one of observers.LIVE."""

    def log(self, rank: int, lines: Sequence[LogLine]) -> None:
        """Show lines that the rank has printed."""

    def redrawn(self, rank: int, text: str) -> None:
        """Show the state of an unfinished line that the rank redraws, as progress bars do; "" once it is finished."""

    def log_line(self, text: str) -> None:
        """Show a line of ddptrain's own log, which DDPTRAIN_LOG or --verbose turns on."""
        self._stderr.write(f"{text}\n")

    def end(self, summary: Sequence[str], last_event: Mapping[str, Any]) -> None:
        """Show the end of the run, as lines or as an object. All logs have been shown."""

    def refresh(self, now_s: float) -> None:
        """Update the output; called after every round, with a monotonic time."""


class PlainRenderer(Renderer):
    """Lines for a pipe, a file, CI, or a terminal that can't redraw.

    Ranks' lines and the summary go to stdout; messages of ddptrain itself go to stderr. A workload that logs numbers,
    and prints fewer lines about epochs or losses than it has epochs, gets a line for each epoch; each workload with
    numbers gets a line after a minute without one.
    """

    def __init__(self, stdout: Stream, stderr: Stream, colour: bool = False, *, bare: int | None = None) -> None:
        """`bare`: the rank whose lines have no prefix, because it is debugged."""
        super().__init__(stdout, stderr, colour)
        self._bare = bare
        self._on_terminal = stdout.is_terminal
        self._status = ""
        self._facts = RunFacts()
        self._has_news = False
        self._printed = self._epochs = 0  # lines of ranks about epochs or losses, and epochs that have ended
        self._due: list[tuple[int, str]] = []  # a line for each of these epochs, unless the ranks have printed one
        self._quiet_since_s: float | None = None  # None: until the next refresh
        self._shown_s = -math.inf

    def log(self, rank: int, lines: Sequence[LogLine]) -> None:
        """Write the lines with the prefix of their rank; each piece of a long line becomes a line."""
        is_bare = rank == self._bare
        self._stdout.write(format_lines(None if is_bare else rank, lines, self._colour, self._on_terminal))
        self._printed += sum(bool(_ABOUT_EPOCHS.search(line.text)) for line in lines)
        self._quiet_since_s = None

    def redrawn(self, rank: int, text: str) -> None:
        """Write a state of a progress bar as a line."""
        if text:
            self.log(rank, [LogLine(text)])

    def event(self, event: Mapping[str, Any]) -> None:
        """Write notices and status to stderr. A status that a notice has announced is not repeated."""
        match event:
            case {"event": "numbers", "rank": 0, "numbers": numbers}:
                for each in numbers:
                    if self._facts.begins_epoch(each):
                        self._epoch_over()
                    self._facts.number(each)
                    self._has_news = self._has_news or isinstance(each, Metrics | Progress)
            case {"event": "rank_ended", "rank": 0} if self._facts.epoch is not None:
                self._epoch_over()
            case {"event": "notice", "message": str(text)}:
                self._stderr.write(format_own(notice(text), False))
            case {"event": "status", "message": str(text)} if text not in ("", self._status):
                if not event.get("announced"):
                    self._status = text
                    self._stderr.write(format_own(notice(text), False))
        self._facts.event(event)

    def end(self, summary: Sequence[str], last_event: Mapping[str, Any]) -> None:
        """Write the summary to stdout."""
        self._stdout.write(format_own(summary, self._colour))

    def refresh(self, now_s: float) -> None:
        """Write the lines that are due. This is called after the ranks' lines of the same time were written."""
        for count, line in self._due:
            if count > self._printed and (count <= MANY_EPOCHS or now_s - self._shown_s >= MANY_EVERY_S):
                self._show(line, now_s)
        self._due.clear()
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        if self._has_news and now_s - self._quiet_since_s >= QUIET_S:
            self._show(self._facts.line(), now_s)
            self._has_news = False

    def _epoch_over(self) -> None:
        self._epochs += 1
        self._due.append((self._epochs, self._facts.line()))
        self._has_news = False

    def _show(self, line: str, now_s: float) -> None:
        self._stderr.write(format_own(notice(line), False))
        self._shown_s = self._quiet_since_s = now_s


class JsonRenderer(Renderer):
    """Writes all facts as JSON lines; the last line contains the result of the run. Ranks are never grouped."""

    def __init__(self, stdout: Stream, stderr: Stream, stage: str = "") -> None:
        """`stage`: the value of the field `stage` in each object; without it if ""."""
        super().__init__(stdout, stderr)
        self._mark = {"stage": stage} if stage else {}
        self._progress: dict[int, Progress] = {}  # not yet written
        self._written_s: dict[int, float] = {}

    def log(self, rank: int, lines: Sequence[LogLine]) -> None:
        """Write one object per line; "partial" marks a line without a newline (yet): a piece, or a redrawn bar."""
        head = json.dumps({"event": "log", **self._mark, "rank": rank, "time_s": round(time.time(), 3)})[:-1]
        encode = json.encoder.encode_basestring_ascii
        ends = {True: "}", False: ', "partial": true}'}
        self._stdout.write("".join(f'{head}, "line": {encode(text)}{ends[ended]}\n' for text, ended in lines))

    def redrawn(self, rank: int, text: str) -> None:
        """Write a state of a progress bar as a partial line."""
        if text:
            self.log(rank, [LogLine(text, ended=False)])

    def event(self, event: Mapping[str, Any]) -> None:
        """Write lines of events.jsonl, unless it is the end of a status; metrics; progress once per second and rank."""
        match event:
            case {"event": "numbers", "rank": rank, "numbers": numbers}:
                for each in numbers:
                    if isinstance(each, Progress):
                        self._progress[rank] = each
                    elif isinstance(each, Metrics):
                        fields = {"step": each.step, "epoch": each.epoch, "values": dict(each.values)}
                        self._write({"event": "metrics", "rank": rank, "time_s": each.time_ns / 1e9} | fields)
            case {"event": "ranks" | "system" | "silence"} | {"event": "status", "message": ""}:
                pass
            case _:
                self._write(event)

    def end(self, summary: Sequence[str], last_event: Mapping[str, Any]) -> None:
        """Write the last object."""
        self.refresh(math.inf)
        if last_event:
            self._write(last_event)

    def refresh(self, now_s: float) -> None:
        """Write the progress of ranks whose last object is a second old."""
        for rank, event in list(self._progress.items()):
            if now_s - self._written_s.get(rank, -math.inf) >= PROGRESS_EVERY_S:
                del self._progress[rank]
                self._written_s[rank] = now_s
                fields = {"done": event.done, "total": event.total, "unit": event.unit}
                self._write({"event": "progress", "rank": rank, "time_s": event.time_ns / 1e9} | fields)

    def _write(self, fields: Mapping[str, Any]) -> None:
        self._stdout.write(json.dumps(as_json_data({**fields, **self._mark})) + "\n")
