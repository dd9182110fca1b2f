"""What differs from run to run is masked, and lines that do not matter are left out: pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence

_WIDTH = 180
_MASKS = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"/tmp/ddptrain-pains-\w+/me"), "/home/me"),
    (re.compile(r"/tmp/ddptrain-pains-\w+/hidden/tmp"), "/tmp"),
    (re.compile(r"/[^\s\"']*/(?=site-packages/|lib/python3|bin/(?:torchrun|ddptrain|python))"), ".../"),
    (re.compile(r"python3\.\d+"), "python3"),
    (re.compile(r"\b([WEI])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ "), r"\1 "),
    (re.compile(r"\[([WE])\d{3,4} \d\d:\d\d:\d\d\.\d+ "), r"[\1 "),
    (re.compile(r"(?<=\.py):\d+\]"), "]"),
    (re.compile(r"(?<=\.cpp):\d+\]"), "]"),
    (re.compile(r"-\d{8}-\d{6}-[0-9a-f]{4}"), "-ID"),
    (re.compile(r"offline-run-[\w-]+"), "offline-run-ID"),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T_ ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?Z?"), "TIME"),
    (re.compile(r"(?i)\b(pid|process(?:es)?)([ :=]+)\d+(?: \d+)*"), r"\1\2PID"),
    (re.compile(r"(?i)\b(\[)?([\d.]+|localhost|::ffff:[\d.]+|::)(\])?:(\d{4,5})\b"), r"\1\2\3:PORT"),
    (re.compile(r"(?i)\bport(:? )\d{4,5}\b"), r"port\1PORT"),
    (re.compile(r"(--master-port )\d+"), r"\1PORT"),
    (re.compile(r"\b\d+(?:\.\d+)? (m?s|kB|MB|GB|MiB)\b"), r"N \1"),
    (re.compile(r"0x[0-9a-f]{6,}"), "0xADDRESS"),
)  # fmt: skip


def masked(line: str, host: str) -> str:
    """Return a line without times, ids, paths, ports and the name of this host."""
    for pattern, replacement in _MASKS:
        line = pattern.sub(replacement, line)
    line = re.sub(rf"\b{re.escape(host)}\b", "HOST", line)
    return line if len(line) <= _WIDTH else f"{line[:_WIDTH]}..."


def trimmed(lines: Sequence[str], keep: Sequence[str]) -> list[str]:
    """Return commands, the notes in parentheses, and the lines that match one of `keep`; `...` stands for others."""
    patterns = [re.compile(pattern) for pattern in keep]
    result: list[str] = []
    for line in lines:
        if not patterns or line.startswith(("$ ", "(")) or any(pattern.search(line) for pattern in patterns):
            result.append(line)
        elif line.strip() and result[-1:] != ["..."]:
            result.append("...")
    return result
