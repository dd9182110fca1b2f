"""Frames of a stack as text, "file:line function", and which of them are the user's."""

from __future__ import annotations

import re
from collections.abc import Sequence

FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+) (?P<function>.*)")
_LIBRARY_FILE = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3|/ddptrain/(rank|worker)/|^<frozen ")


def users_frame(frames: Sequence[str]) -> str:
    """Return the innermost frame of the user's code, or else of any code, as "train.py:41 in load"; "" if none.

    The innermost frame is the first one.
    """
    matches = [match for frame in frames if (match := FRAME.fullmatch(frame)) is not None]
    of_user = [match for match in matches if not _LIBRARY_FILE.search(match["file"])]
    chosen = next(iter(of_user or matches), None)
    if chosen is None:
        return ""
    name = chosen["file"].rpartition("/")[2]
    return f"{name}:{chosen['line']} in {chosen['function']}"
