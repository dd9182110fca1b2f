"""Console blocks of Markdown pages, and how their output is compared: pure functions.

A block runs unless `<!-- not run: REASON -->` is on the line before it. A line `...` stands for any lines, `...` in a
line for any text. Times, ids, folders and rates are masked, other decimals may differ by a twentieth, and a line that
only a slow machine prints is left out. A command without output in the page may print anything. A command must end
with 0, unless the page shows its error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_SKIPPED = re.compile(r"<!-- not run: (?P<reason>.+) -->")
_MASKS = (
    (re.compile(r"-\d{8}-\d{6}-[0-9a-f]{4}"), "-ID"),
    (re.compile(r"(?:\.\.\.|/home/me|/tmp)(?:/[\w.-]+)*/(?=runs\b|report\.html)"), "FOLDER/"),
    (re.compile(r"time +queue \d.*"), "time SPENT"),
    (re.compile(r"ddptrain-sockets-\w+"), "SOCKETS"),
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?"), "TIME"),
    (re.compile(r"\d[\d,.]*(?: (?:names|images|samples|steps|batches)/s| (?:ms|s|kB|MB|GB)\b)"), "QUANTITY"),
    (re.compile(r"ETA [\d:]+"), "ETA LEFT"),
    (re.compile(r"samples_per_s [\d,.]+"), "samples_per_s RATE"),
    (re.compile(r"\bprocess \d+"), "process PID"),
    (re.compile(r" on \w[\w.-]*(?=$| failed)"), " on HOST"),
)
_SLOW_MACHINE = "ddptrain: waiting for workers: "  # only where starting takes seconds
_DECIMAL = re.compile(r"\d+\.\d+")
_TOLERANCE = 0.05


@dataclass(slots=True)
class Command:
    """A command of a block, with the output that the page shows."""

    text: str
    expected: list[str] = field(default_factory=list)

    @property
    def may_fail(self) -> bool:
        """Whether the page shows an error as its output."""
        return any("error: " in line for line in self.expected)


@dataclass(slots=True)
class Block:
    """A console block. `line` is its first line in the page; `skipped` the reason why it does not run, or ""."""

    line: int
    skipped: str
    commands: list[Command]


def blocks_of(markdown: str) -> list[Block]:
    """Return the console blocks of a page."""
    blocks: list[Block] = []
    before, inside = "", False
    for number, line in enumerate(markdown.splitlines(), start=1):
        if inside and line.startswith("```"):
            inside = False
        elif inside:
            _add(blocks[-1].commands, line)
        elif line.strip() == "```console":
            match = _SKIPPED.fullmatch(before.strip())
            blocks.append(Block(number, match["reason"] if match else "", []))
            inside = True
        before = line
    return blocks


def _add(commands: list[Command], line: str) -> None:
    last = commands[-1] if commands else None
    if line.startswith("$ "):
        commands.append(Command(line[2:]))
    elif last and not last.expected and last.text.endswith("\\"):
        last.text += f"\n{line}"
    elif last and not last.expected and line.startswith("> "):
        last.text += f"\n{line[2:]}"
    elif last:
        last.expected.append(line)


def difference(expected: Sequence[str], actual: str) -> str:
    """Return "" if the output is as the page shows it, else the first line of the page that is not found."""
    if not expected:
        return ""
    wanted = _ordered([_masked(line) for line in expected])
    found = _ordered([_masked(line) for line in actual.splitlines() if _counts(line)])
    positions = {0}  # how many lines of the output may be used up
    for line in wanted:
        if not line:
            continue
        if line == "...":
            positions = set(range(min(positions), len(found) + 1))
            continue
        after = {at + 1 for at in positions if at < len(found) and _is_like(line, found[at])}
        if not after:
            at = min(positions)
            return f"expected {line!r}, got {found[at] if at < len(found) else 'the end'!r}"
        positions = after
    return "" if len(found) in positions else f"more than expected: {found[max(positions)]!r}"


def _counts(line: str) -> bool:
    return bool(line.strip()) and not line.startswith(_SLOW_MACHINE)


def _masked(line: str) -> str:
    for pattern, name in _MASKS:
        line = pattern.sub(name, line)
    return " ".join(line.split())


def _ordered(lines: list[str]) -> list[str]:
    """The lines, with neighbouring lines of ranks in the order of the ranks."""
    result: list[str] = []
    for line in lines:
        at = len(result)
        while (
            line.startswith("[rank ")
            and at
            and result[at - 1].startswith("[rank ")
            and _rank(result[at - 1]) > _rank(line)
        ):
            at -= 1
        result.insert(at, line)
    return result


def _rank(line: str) -> int:
    return int(line[6 : line.index("]")])


def _is_like(wanted: str, found: str) -> bool:
    parts = [_pattern(part) for part in wanted.split("...")]
    match = re.fullmatch(".*".join(parts), found)
    if not match:
        return False
    pairs = zip(_DECIMAL.findall(wanted), match.groups(), strict=True)
    return all(math.isclose(float(one), float(other), rel_tol=_TOLERANCE) for one, other in pairs)


def _pattern(text: str) -> str:
    return r"(\d+\.\d+)".join(re.escape(part) for part in _DECIMAL.split(text))
