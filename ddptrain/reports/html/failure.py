"""The failure of a run: the frames of the user's code, and the last lines of the ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddptrain.file_ops import open_regular
from ddptrain.redact import hide_credentials, hide_known
from ddptrain.reports.source_line import is_installed
from ddptrain.results.lookup import RunView
from ddptrain.results.run_record import FailureRecord
from ddptrain.results.show.tail import final_text

_FRAME = re.compile(r'^[ |+]*File "(?P<file>[^"\n]{1,1000})", line (?P<line>\d{1,9})(?:, in (?P<name>[^\n]{1,300}))?')
_MOST_FRAMES = 20
_TRACEBACK_CHARACTERS = 20_000
_MOST_RANKS = 16
_LINES = 40
_LINE_CHARACTERS = 500
_READ_BYTES = 256 << 10  # the end of a log


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of the user's code, the outermost first; `code` has its source line if the traceback has it."""

    file: str
    line: int
    function: str
    code: str


@dataclass(frozen=True, slots=True)
class Tail:
    """The last lines of a rank."""

    rank: int
    lines: Sequence[str]


def user_frames(failure: FailureRecord | None) -> list[Frame]:
    """Return the last 20 frames of a traceback that are neither in the standard library nor in installed packages."""
    lines = shown_traceback(failure).splitlines()
    frames = []
    for at, text in enumerate(lines):
        match = _FRAME.match(text)
        if match and not is_installed(match["file"]):
            frames.append(Frame(match["file"], int(match["line"]), match["name"] or "", _code(lines[at + 1 :])))
    return frames[-_MOST_FRAMES:]


def _code(below: Sequence[str]) -> str:
    """The source line of a frame; lines that only mark a part of it are left out."""
    for text in below[:1]:
        if text.startswith("    ") and not _FRAME.match(text):
            return text.strip()
    return ""


def shown_traceback(failure: FailureRecord | None) -> str:
    """Return the end of the traceback, which names the error."""
    text = failure.traceback.rstrip() if failure is not None else ""
    return text if len(text) <= _TRACEBACK_CHARACTERS else f"...\n{text[-_TRACEBACK_CHARACTERS:]}"


def tails(view: RunView, budget_bytes: int, secrets: Iterable[str] = ()) -> list[Tail]:
    """Return the last lines of the first 16 ranks, that of the failure first, each with an equal part of the budget."""
    failure = view.record.failure
    first = failure.rank if failure is not None else None
    logs = sorted(view.layout.logs().items(), key=lambda item: (item[0] != first, item[0]))[:_MOST_RANKS]
    room = budget_bytes // max(1, len(logs))
    return [Tail(rank, lines) for rank, path in logs if (lines := _last_lines(path, room, secrets))]


def _last_lines(path: Path, room: int, secrets: Iterable[str]) -> list[str]:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _READ_BYTES))
            lines = file.read(_READ_BYTES).decode("utf-8", "replace").split("\n")
    except OSError:
        return []
    kept: list[str] = []
    for line in reversed(lines[:-1] if lines[-1] == "" else lines):
        shown = _shortened(line[-_READ_BYTES:], secrets)
        room -= len(shown.encode(errors="replace")) + 1
        if room < 0 or len(kept) == _LINES:
            break
        kept.append(shown)
    return kept[::-1]


def _shortened(line: str, secrets: Iterable[str]) -> str:
    text = final_text(line if line.count("\r") < 1000 else line.rpartition("\r")[2])
    cut = text[: 2 * _LINE_CHARACTERS]
    shown = str(hide_credentials(hide_known(cut, secrets)))
    return shown if len(shown) <= _LINE_CHARACTERS else f"{shown[:_LINE_CHARACTERS]}..."
