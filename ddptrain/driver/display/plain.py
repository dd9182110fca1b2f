"""Plain lines: what ranks print on stdout, `[rank 1] text`, and what ddptrain says on stderr."""

from __future__ import annotations

from collections.abc import Sequence

from ddptrain.driver.display import messages as told
from ddptrain.driver.display.lines import Line
from ddptrain.driver.display.stream import Stream
from ddptrain.driver.display.terminal import coloured, harmless, rank_colour


class PlainRenderer:
    """Lines for a pipe, a file, CI, or a terminal that can do no more."""

    redraw_every_s = 1.0

    def __init__(self, stdout: Stream, stderr: Stream, colour: bool) -> None:
        self._stdout, self._stderr = stdout, stderr
        self._colour = colour
        self._on_terminal = stdout.is_terminal
        self._status = ""

    def log(self, rank: int, lines: Sequence[Line]) -> None:
        """Write the lines with the rank's prefix; a piece of a long line is a line of its own."""
        self._stdout.write(format_lines(rank, lines, self._colour, self._on_terminal))

    def tell(self, message: told.Message) -> None:
        """Say what is waited for and noticed on stderr, and the summary on stdout."""
        match message:
            case told.Redrawn(rank, text) if text:
                self.log(rank, [Line(text, ended=False)])
            case told.Notice(text, _):
                self._say(text)
            case told.Status(text) if text and text != self._status:
                self._status = text
                self._say(text)
            case told.Closing(summary, _):
                self._stdout.write(format_own(summary, self._colour))
            case _:
                pass  # bars and numbers: for those who look at a live display, or read JSON

    def refresh(self, now_s: float) -> None:
        """Nothing is kept back, so nothing is to be done."""

    def _say(self, text: str) -> None:
        lines = format_notice(text).splitlines()
        self._stderr.write(format_own(lines, colour=False))


def format_lines(rank: int, lines: Sequence[Line], colour: bool, on_terminal: bool) -> str:
    """The lines as text, each with its prefix; on a terminal without anything that could garble it."""
    prefix = f"[rank {rank}] "
    if colour:
        prefix = coloured(prefix[:-1], rank_colour(rank)) + " "
    if on_terminal:
        return "".join([f"{prefix}{harmless(line.text, colour)}\n" for line in lines])
    return "".join([f"{prefix}{line.text}\n" for line in lines])


def format_own(lines: Sequence[str], colour: bool) -> str:
    """The lines as text, without anything that could garble a terminal."""
    return "".join(f"{harmless(line, colour)}\n" for line in lines)


def format_notice(text: str) -> str:
    """Each line of it, marked as ddptrain's own."""
    return "".join(f"ddptrain: {line}\n" for line in text.splitlines())
