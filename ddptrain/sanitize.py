"""Makes untrusted text safe for a terminal: names, messages and logs of runs, clusters and hosts.

Unsafe are control characters (C0 but tab and newline, DEL, C1) and with them all escape sequences; line and paragraph
separators; characters that change the writing direction (bidi marks, overrides, isolates); and invisible ones:
zero-width spaces, the byte order mark, tags, halves of surrogate pairs. The zero-width joiner and non-joiner stay:
scripts and emoji need them.
"""

from __future__ import annotations

import re

_UNSAFE = (
    "\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb"
    "\\ud800-\\udfff\\U000e0000-\\U000e007f"
)
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_CHARACTER = re.compile(f"[{_UNSAFE}]")
_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movements, modes
    r"|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)"  # OSC: titles, links
    r"|\x1b[PX^_][^\x1b\n]*\x1b\\"  # strings for devices
    r"|\x1b\[[0-?]*[ -/]*"  # CSI that the end of the line cuts off
    r"|\x1b[ -/]*[0-~]?"  # every other escape sequence
    f"|[{_UNSAFE}]"
)


def sanitized(text: str, *, colours: bool = False, mark: str = "") -> str:
    """Remove unsafe characters and escape sequences; `colours` keeps sequences that only change colours.

    With a `mark`, each unsafe character is replaced by it and nothing else is removed, so that names that differ only
    in unsafe characters do not look the same.
    """
    if text.isprintable():
        return text
    if mark:
        return _CHARACTER.sub(mark, text)
    return _SEQUENCE.sub(_keep_colour if colours else "", text)


def _keep_colour(match: re.Match[str]) -> str:
    return match[0] if _COLOUR.fullmatch(match[0]) else ""
