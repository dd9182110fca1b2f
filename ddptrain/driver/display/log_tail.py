"""Follows one rank's log file while the rank appends to it."""

from __future__ import annotations

import os
from pathlib import Path

from ddptrain.driver.display.lines import Line, LineAssembler
from ddptrain.file_ops import open_regular

READ_BYTES = 64 * 1024  # a read; small, as a read of short lines becomes many objects


class LogTail:
    """Reads a file that may not exist yet, from `offset`; `end`, once set, is the size after which nothing is read."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.end: int | None = None
        self._lines = LineAssembler()
        self._fd = -1
        self._shown, self._due_s = "", 0.0

    @property
    def drained(self) -> bool:
        """Everything up to `end` has been read."""
        return self.end is not None and self.offset >= self.end

    def read(self) -> list[Line]:
        """The lines that the next READ_BYTES bytes complete; none where there is nothing new."""
        size = READ_BYTES if self.end is None else min(READ_BYTES, self.end - self.offset)
        if size <= 0:
            return []
        try:
            if self._fd < 0:
                self._fd = open_regular(self.path)
            data = os.pread(self._fd, size, self.offset)
        except OSError:  # not there yet, or the file system lost our handle: open it again next time
            self.close()
            return []
        self.offset += len(data)
        return self._lines.feed(data) if data else []

    def size(self) -> int:
        """The file's size now, in bytes; 0 where there is none."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def redrawn(self, now_s: float, every_s: float) -> str | None:
        """The new state of a line that is being redrawn, "" when it is over; None if not due or the same."""
        state = self._lines.redrawn
        if not state:
            over, self._shown, self._due_s = bool(self._shown), "", 0.0
            return "" if over else None
        if not self._due_s:
            self._due_s = now_s + every_s  # a bar that ends sooner is only shown as it ended
        if now_s < self._due_s or state == self._shown:
            return None
        self._shown, self._due_s = state, now_s + every_s
        return state

    def finish(self) -> list[Line]:
        """The last line, if it has no newline."""
        return self._lines.finish()

    def close(self) -> None:
        """Give the file back; a later read opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
