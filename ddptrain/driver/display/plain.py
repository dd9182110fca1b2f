"""Plain lines: the output of ranks goes to stdout as `[rank 1] text`, messages of ddptrain itself go to stderr."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ddptrain.driver.display import output_api
from ddptrain.driver.display.log_tail import RankLine
from ddptrain.driver.display.output_stream import Stream
from ddptrain.driver.display.run_facts import RunFacts
from ddptrain.driver.display.terminal import coloured, harmless, rank_colour, wrapped

QUIET_S = 60.0  # without any line
_ABOUT_EPOCHS = re.compile(r"\bepoch\b|loss\b", re.IGNORECASE)
MANY_EPOCHS, MANY_EVERY_S = 100, 10.0  # of further epochs, at most one line in this time


class PlainRenderer:
    """Lines for a pipe, a file, CI, or a terminal that can't redraw.

    A workload that logs numbers, and prints fewer lines about epochs or losses than it has epochs, gets a line for each
    epoch; each workload with numbers gets a line after a minute without one.
    """

    redraw_every_s = 1.0

    def __init__(self, stdout: Stream, stderr: Stream, colour: bool) -> None:
        self._stdout, self._stderr = stdout, stderr
        self._colour = colour
        self._on_terminal = stdout.is_terminal
        self._status = ""
        self._facts = RunFacts()
        self._has_news = False
        self._printed = self._epochs = 0  # lines of ranks about epochs or losses, and epochs that have ended
        self._due: list[tuple[int, str]] = []  # a line for each of these epochs, unless the ranks have printed one
        self._quiet_since_s: float | None = None  # None: until the next refresh
        self._shown_s = -math.inf

    def log(self, ranks: Sequence[int], lines: Sequence[RankLine]) -> None:
        """Write the lines with the prefix of their ranks; each piece of a long line becomes a line."""
        self._stdout.write(format_lines(ranks, lines, self._colour, self._on_terminal))
        self._printed += sum(bool(_ABOUT_EPOCHS.search(line.text)) for line in lines)
        self._quiet_since_s = None

    def handle(self, message: output_api.Message) -> None:
        """Write status, notices and ddptrain's log to stderr, the end-of-run summary to stdout."""
        self._note(message)
        match message:
            case output_api.RedrawnLine(rank, text) if text:
                self.log([rank], [RankLine(text)])
            case output_api.DriverNotice(text, _):
                self._stderr.write(format_own(format_notice(text).splitlines(), colour=False))
            case output_api.DriverStatus(text, announced=False) if text and text != self._status:
                self._status = text
                self._stderr.write(format_own(format_notice(text).splitlines(), colour=False))
            case output_api.LogLine(text):
                self._stderr.write(f"{text}\n")
            case output_api.Closing(summary, _):
                self._stdout.write(format_own(summary, self._colour))
            case _:
                pass

    def refresh(self, now_s: float) -> None:
        """Write the lines that are due. This is called after the ranks' lines of the same time were written."""
        for number, line in self._due:
            if number > self._printed and (number <= MANY_EPOCHS or now_s - self._shown_s >= MANY_EVERY_S):
                self._show(line, now_s)
        self._due.clear()
        if self._quiet_since_s is None:
            self._quiet_since_s = now_s
        if self._has_news and now_s - self._quiet_since_s >= QUIET_S:
            self._show(self._facts.line(), now_s)
            self._has_news = False

    def _note(self, message: output_api.Message) -> None:
        if self._facts.begins_epoch(message) or (
            isinstance(message, output_api.RankEnded) and message.rank == 0 and self._facts.epoch is not None
        ):
            self._epochs += 1
            self._due.append((self._epochs, self._facts.line()))
            self._has_news = False
        self._facts.handle(message)
        match message:
            case output_api.RankMetrics() | output_api.RankProgress():
                self._has_news = True

    def _show(self, line: str, now_s: float) -> None:
        self._stderr.write(format_notice(line))
        self._shown_s = self._quiet_since_s = now_s


def format_lines(ranks: Sequence[int], lines: Sequence[RankLine], colour: bool, on_terminal: bool) -> str:
    """Return the lines as text, each with its prefix; on a terminal without control sequences other than colours."""
    prefix = f"[rank {ranks[0]}]"
    if colour:
        prefix = coloured(prefix, rank_colour(ranks[0]))
    if on_terminal:
        return "".join([f"{prefix} {harmless(line.text, colour)}\n" for line in lines])
    return "".join([f"{prefix} {line.text}\n" for line in lines])


def format_own(lines: Sequence[str], colour: bool, columns: int | None = None) -> str:
    """Return lines of ddptrain itself as text, without control sequences other than colours, fitted to `columns`."""
    safe = (harmless(line, colour) for line in lines)
    return "".join(f"{part}\n" for line in safe for part in (wrapped(line, columns) if columns else [line]))


def format_notice(text: str) -> str:
    """Return the text with `ddptrain: ` before each of its lines."""
    return "".join(f"ddptrain: {line}\n" for line in text.splitlines())
