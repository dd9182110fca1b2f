"""Shows the logs of a run: whole lines, as a terminal would show them; follows them while the run is running."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ddptrain.errors import RunNotFound
from ddptrain.file_ops import open_regular
from ddptrain.results.errors import results_errors
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView, load_run

_BLOCK_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 20  # a longer line is shown in pieces, so that memory stays bounded
_POLL_S = 0.1
_STATUS_EVERY_S = 0.5


def final_text(line: str) -> str:
    """Return the line as a terminal shows it after its carriage returns."""
    shown = ""
    for part in line.split("\r"):
        # Progress bars that use escape codes clear the rest of the line.
        shown = part if "\x1b" in part else part + shown[len(part) :]
    return shown


class LogCursor:
    """Reads a growing log; keeps the bytes of a line that has not ended."""

    def __init__(self, path: Path, lines: int | None = None, offset: int = 0) -> None:
        """Begin at the `offset`, or with the last `lines` lines."""
        self._path = path
        self._partial = b""
        self._offset = offset if lines is None else start_of_last(path, lines)

    def read(self) -> Iterator[str]:
        """Yield the lines that have ended since the last call; none while there is no file."""
        with results_errors(self._path, "read"):
            try:
                descriptor = open_regular(self._path)
            except FileNotFoundError:
                return
        with os.fdopen(descriptor, "rb") as file:
            if file.seek(0, 2) < self._offset:
                self._offset = 0  # truncated, or replaced
            file.seek(self._offset)
            while block := file.read(_BLOCK_BYTES):
                self._offset += len(block)
                *whole, self._partial = (self._partial + block).split(b"\n")
                yield from (_decoded(line) for line in whole)
                if len(self._partial) > _LONGEST_LINE_BYTES:
                    yield from self.rest()

    def rest(self) -> Iterator[str]:
        """Yield the last line if it has not ended."""
        if self._partial:
            yield _decoded(self._partial)
            self._partial = b""


def _decoded(line: bytes) -> str:
    return final_text(line.decode("utf-8", "replace"))


def start_of_last(path: Path, lines: int) -> int:
    """Return the offset of the last `lines` lines of a file; a last line without a newline counts."""
    with results_errors(path, "read"):
        try:
            descriptor = open_regular(path)
        except FileNotFoundError:
            return 0
    with os.fdopen(descriptor, "rb") as file:
        end = file.seek(0, 2)
        position = end - 1 if lines > 0 else 0  # the last byte ends the last line, or is part of it
        while position > 0:
            start = max(0, position - _BLOCK_BYTES)
            file.seek(start)
            block = file.read(position - start)
            at = len(block)
            while (at := block.rfind(b"\n", 0, at)) >= 0:
                lines -= 1
                if lines == 0:
                    return start + at + 1
            position = start
        return 0 if lines > 0 else end


def show_logs(view: RunView, rank: int | None = None, lines: int | None = None) -> Iterator[str]:
    """Yield the lines of every rank, or of one; only the last `lines` of each, if given. Several ranks have a prefix.

    Raises RunNotFound if the run has no log of that rank.
    """
    return follow_logs(view, rank, lines, is_running=lambda: False)


def follow_logs(
    view: RunView,
    rank: int | None = None,
    lines: int | None = None,
    *,
    is_running: Callable[[], bool] | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """Like show_logs(), then yield each new line until the run has ended.

    Raises RunNotFound if the run has ended and has no log of that rank.
    """
    still_running = is_running or _StatusWatch(view.layout)
    prefixed = _is_prefixed(view, rank)
    cursors: dict[int, LogCursor] = {}
    running = True
    while running:
        running = still_running()  # before the last read: all that was printed before the end is then read
        for number, path in _chosen(view.layout, rank).items():
            # `lines` applies to logs that exist at the start; all lines of a later one are new.
            cursors.setdefault(number, LogCursor(path, lines))
        lines = None
        for number, cursor in cursors.items():
            prefix = f"[rank {number}] " if prefixed else ""
            yield from (prefix + line for line in cursor.read())
            if not running:
                yield from (prefix + line for line in cursor.rest())
        if running:
            wait(_POLL_S)
    if rank is not None and not cursors:
        raise RunNotFound(_no_log(view, rank))


class _StatusWatch:
    """Says whether the run is running, without reading run.json at every poll."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._asked_at = float("-inf")
        self._running = True

    def __call__(self) -> bool:
        if time.monotonic() - self._asked_at >= _STATUS_EVERY_S:
            self._running = load_run(self._layout.root).is_running
            self._asked_at = time.monotonic()
        return self._running


def _chosen(layout: RunLayout, rank: int | None) -> dict[int, Path]:
    return {number: path for number, path in layout.logs().items() if rank in (None, number)}


def _is_prefixed(view: RunView, rank: int | None) -> bool:
    several = max(view.record.world_size, len(view.layout.logs())) > 1
    return rank is None and (several or view.record.world_size == 0)  # 0: not known before the ranks start


def _no_log(view: RunView, rank: int) -> str:
    numbers = ", ".join(str(number) for number in view.layout.logs())
    return f"run {view.run_id} has no log of rank {rank}; " + (
        f"it has logs of ranks {numbers}" if numbers else "it has no logs"
    )
