"""Folds long output of ranks in the log of a CI job; messages of ddptrain stay visible."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

from ddptrain.ci import CiService, fold_end, fold_start
from ddptrain.driver.display import output_api
from ddptrain.driver.display.line_assembler import RankLine
from ddptrain.driver.display.output_stream import Stream

VISIBLE_LINES = 30  # of ranks, after each message of ddptrain; further lines are folded
_numbers = itertools.count(1)  # a command may show several runs


class FoldingRenderer:
    """Passes everything on to another renderer, and writes the start and end of sections between its lines."""

    redraw_every_s = 1.0

    def __init__(self, renderer: output_api.Renderer, stdout: Stream, service: CiService) -> None:
        self._renderer, self._stdout, self._service = renderer, stdout, service
        self._shown = 0  # lines since the last message of ddptrain
        self._open = ""

    def log(self, ranks: Sequence[int], lines: Sequence[RankLine]) -> None:
        """Show the lines; put lines beyond VISIBLE_LINES into a folded section."""
        first = 0 if self._open else max(0, VISIBLE_LINES - self._shown)
        if visible := lines[:first]:
            self._renderer.log(ranks, visible)
        if folded := lines[first:]:
            self._begin()
            self._renderer.log(ranks, folded)
        self._shown += len(lines)

    def handle(self, message: output_api.Message) -> None:
        """Pass the message on; a message that is shown ends the section."""
        match message:
            case output_api.RedrawnLine(rank, text) if text:
                self.log([rank], [RankLine(text)])
                return
            case output_api.DriverNotice() | output_api.Closing() | output_api.WorldSize():
                self._end()
            case _:
                pass
        self._renderer.handle(message)

    def refresh(self, now_s: float) -> None:
        """Bring the output up to date."""
        self._renderer.refresh(now_s)

    def _begin(self) -> None:
        if not self._open:
            self._open = f"ddptrain_{os.getpid()}_{next(_numbers)}"
            self._stdout.write_command(fold_start(self._service, "more output of the ranks", self._open))

    def _end(self) -> None:
        if self._open:
            self._stdout.write_command(fold_end(self._service, self._open))
        self._open, self._shown = "", 0
