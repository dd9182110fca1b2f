"""The live display: log lines, and below them progress bars that are redrawn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ddptrain.driver.display import output_api, progress_bars, terminal
from ddptrain.driver.display.line_assembler import RankLine
from ddptrain.driver.display.output_stream import Stream
from ddptrain.driver.display.plain import format_lines, format_notice, format_own

CLEAR_ROW, UP_AND_CLEAR_ROW = "\r\x1b[2K", "\x1b[1A\x1b[2K"
NOTICE_COLOURS = {"warning": terminal.YELLOW, "error": terminal.RED}


class LiveRows(Protocol):
    """The rows at the bottom of the terminal, and a status."""

    status: str

    def handle(self, message: output_api.Message) -> None:
        """Update the rows after a message."""

    def block(self, elapsed_s: float, columns: int, rows: int) -> list[progress_bars.Row]:
        """Return the rows as they are now, at most half of the terminal's `rows`, none wider than `columns`."""


class LiveRenderer:
    """Draws on any terminal that can move its cursor up and clear a row.

    The cursor stays visible at the start of the row below the bars, so that the terminal is usable even after a kill.
    Log lines and bars are written together, to avoid flicker.
    """

    redraw_every_s = 0.1

    def __init__(
        self,
        stdout: Stream,
        stderr: Stream,
        size: Callable[[], tuple[int, int]],
        colour: bool,
        run_id: str,
        *,
        all_ranks: bool = False,
        bars: LiveRows | None = None,
        elapsed_s: float = 0.0,
    ) -> None:
        """`size` returns columns and rows; with `all_ranks` each rank has a bar, however many there are.

        `bars` are shown instead of those of the ranks. `elapsed_s`: how long the run has already been running.
        """
        glyphs = progress_bars.UNICODE_GLYPHS if stdout.is_unicode else progress_bars.ASCII_GLYPHS
        self._bars: LiveRows = bars or progress_bars.Bars(run_id, glyphs, all_ranks=all_ranks)
        self._stdout, self._stderr, self._size, self._colour = stdout, stderr, size, colour
        self._above: list[str] = []  # to be printed above the bars with the next frame
        self._drawn: list[progress_bars.Row] = []
        self._drawn_size = (0, 0)
        self._started_s = time.monotonic() - elapsed_s

    def log(self, ranks: Sequence[int], lines: Sequence[RankLine]) -> None:
        """Print the lines above the bars, with the next frame."""
        self._above.append(format_lines(ranks, lines, self._colour, on_terminal=True))

    def handle(self, message: output_api.Message) -> None:
        """Handle a message; notices and ddptrain's log are printed above the bars, the summary below them."""
        self._bars.handle(message)
        match message:
            case output_api.DriverNotice(text, level):
                self._print_above(format_notice(text), NOTICE_COLOURS.get(level, ""))
            case output_api.LogLine(text) if self._stderr.is_terminal:
                self._print_above(text, terminal.DIM)
            case output_api.LogLine(text):  # `2> file`
                self._stderr.write(f"{text}\n")
            case output_api.Closing(summary, _):
                self._bars.status = ""
                self.refresh(time.monotonic())
                self._stdout.write(format_own(summary, self._colour))
                self._drawn = []  # the bars stay as they are, above the summary
            case _:
                pass

    def _print_above(self, text: str, colour: str) -> None:
        for line in text.splitlines():
            safe = terminal.harmless(line, False)
            self._above.append(terminal.coloured(safe, colour if self._colour else "") + "\n")

    def refresh(self, now_s: float) -> None:
        """Draw a frame, if anything has changed."""
        size = self._size()
        columns, rows = size
        block = self._bars.block(now_s - self._started_s, max(columns - 1, 1), rows)
        if not self._above and block == self._drawn and size == self._drawn_size:
            return
        above = "".join(self._above)
        self._above.clear()
        self._stdout.write(self._erase(columns, rows) + above + "".join(map(self._text, block)))
        self._drawn, self._drawn_size = block, size

    def _erase(self, columns: int, rows: int) -> str:
        """Return the control sequences that move the cursor to the first row of the last frame and clear each row.

        A terminal that has become narrower has wrapped the rows of the last frame. A single sequence that clears the
        rest of the screen would be shorter, but if this is the whole screen, tmux copies it into its history.
        """
        widths = [sum(terminal.cells(piece.text) for piece in row) for row in self._drawn]
        height = sum(max(-(-width // columns), 1) for width in widths)
        return CLEAR_ROW + UP_AND_CLEAR_ROW * min(height, rows - 1)

    def _text(self, row: progress_bars.Row) -> str:
        if not self._colour:
            return "".join(piece.text for piece in row) + "\n"
        return "".join(terminal.coloured(piece.text, piece.colour) for piece in row) + "\n"
