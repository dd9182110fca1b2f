"""Plain lines: the output of ranks goes to stdout as `[rank 1] text`, messages of ddptrain itself go to stderr."""

from __future__ import annotations

from collections.abc import Sequence

from ddptrain.driver.display import output_api
from ddptrain.driver.display.grouping import label
from ddptrain.driver.display.line_assembler import RankLine
from ddptrain.driver.display.output_stream import Stream
from ddptrain.driver.display.terminal import coloured, harmless, rank_colour


class PlainRenderer:
    """Lines for a pipe, a file, CI, or a terminal that can't redraw."""

    redraw_every_s = 1.0
    shows_numbers = False

    def __init__(self, stdout: Stream, stderr: Stream, colour: bool) -> None:
        self._stdout, self._stderr = stdout, stderr
        self._colour = colour
        self._on_terminal = stdout.is_terminal
        self._status = ""

    def log(self, ranks: Sequence[int], lines: Sequence[RankLine]) -> None:
        """Write the lines with the prefix of their ranks; each piece of a long line becomes a line."""
        self._stdout.write(format_lines(ranks, lines, self._colour, self._on_terminal))

    def handle(self, message: output_api.Message) -> None:
        """Write status, notices and ddptrain's log to stderr, the end-of-run summary to stdout."""
        match message:
            case output_api.RedrawnLine(rank, text) if text:
                self.log([rank], [RankLine(text)])
            case output_api.DriverNotice(text, _):
                self._stderr.write(format_own(format_notice(text).splitlines(), colour=False))
            case output_api.DriverStatus(text) if text and text != self._status:
                self._status = text
                self._stderr.write(format_own(format_notice(text).splitlines(), colour=False))
            case output_api.LogLine(text):
                self._stderr.write(f"{text}\n")
            case output_api.Closing(summary, _):
                self._stdout.write(format_own(summary, self._colour))
            case _:
                pass  # progress and metrics: for a live display and for JSON

    def refresh(self, now_s: float) -> None:
        """Do nothing, because all lines are written at once."""


def format_lines(ranks: Sequence[int], lines: Sequence[RankLine], colour: bool, on_terminal: bool) -> str:
    """Return the lines as text, each with its prefix; on a terminal without control sequences other than colours."""
    prefix = label(ranks)
    if colour:
        prefix = coloured(prefix, rank_colour(ranks[0]))
    if on_terminal:
        return "".join([f"{prefix} {harmless(line.text, colour)}\n" for line in lines])
    return "".join([f"{prefix} {line.text}\n" for line in lines])


def format_own(lines: Sequence[str], colour: bool) -> str:
    """Return lines of ddptrain itself as text, without control sequences other than colours."""
    return "".join(f"{harmless(line, colour)}\n" for line in lines)


def format_notice(text: str) -> str:
    """Return the text with `ddptrain: ` before each of its lines."""
    return "".join(f"ddptrain: {line}\n" for line in text.splitlines())
