"""The table of versions in a cluster: processes with equal answers share a row, values that do not fit are marked."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddptrain.config.wording import counted, shorten

_WIDTH = 90  # 100 with the prefix that the display adds to each line
_INDENT = "  "
_GAP = "  "
_MARK = " !"
_VALUE_WIDTH = 12
_NAMES_WIDTH = 26  # if names need more, columns without errors are left out first
_LEAST_NAMES_WIDTH = 12
_MOST_OF_A_REASON = 400


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One process: its value in each column, or the `reason` for no answer; the columns in `wrong` are marked."""

    who: str
    cells: Mapping[str, str]
    wrong: frozenset[str] = frozenset()
    reason: str = ""


def table(title: str, rows: Sequence[VersionRow], below: str) -> str:
    """The lines of the table, at most 90 characters wide unless every column is needed.

    Workers with equal values share a row.
    """
    alike: dict[tuple[object, ...], list[VersionRow]] = {}
    for row in rows:
        kind = row.who if not _is_address(row.who) else ""
        alike.setdefault((kind, tuple(row.cells.items()), row.wrong, row.reason), []).append(row)
    groups = list(zip(_names(list(alike.values())), (group[0] for group in alike.values()), strict=True))
    columns = _columns([row for _, row in groups])
    lines = _aligned(groups, columns)
    advice = textwrap.wrap(below, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join([title, *(f"{_INDENT}{line}".rstrip() for line in lines), *advice])


def _aligned(groups: Sequence[tuple[str, VersionRow]], columns: Mapping[str, int]) -> list[str]:
    """The lines of one row; a name that is too long for its column gets a line of its own."""
    room = _WIDTH - len(_INDENT) - sum(len(_GAP) + width for width in columns.values())
    names_width = min(max(len(name) for name, _ in groups), max(_LEAST_NAMES_WIDTH, room))
    lines = [" " * names_width + _GAP + _joined(columns, columns)]
    for name, row in groups:
        short = name if len(name) <= names_width else ""
        above = [] if short else textwrap.wrap(name, _WIDTH - len(_INDENT), break_on_hyphens=False)
        first, *more = _values(row, columns, _WIDTH - len(_INDENT) - names_width - len(_GAP))
        lines += [*above, f"{short:{names_width}}{_GAP}{first}", *(" " * names_width + _GAP + line for line in more)]
    return lines


def _values(row: VersionRow, columns: Mapping[str, int], width: int) -> list[str]:
    if row.reason:
        return textwrap.wrap(shorten(row.reason, _MOST_OF_A_REASON), width)
    return [_joined((_cell(row, column) for column in columns), columns)]


def _joined(cells: Iterable[str], columns: Mapping[str, int]) -> str:
    return _GAP.join(f"{cell:{width}}" for cell, width in zip(cells, columns.values(), strict=True))


def _cell(row: VersionRow, column: str) -> str:
    return shorten(row.cells[column], _VALUE_WIDTH) + (_MARK if column in row.wrong else "")


def _columns(rows: Sequence[VersionRow]) -> dict[str, int]:
    """The columns with their widths. If the table is too wide, columns without errors are left out, last first."""
    filled = [row for row in rows if row.cells]
    widths = {column: max(len(column), *(len(_cell(row, column)) for row in filled)) for column in filled[0].cells}
    fine = [column for column in widths if not any(column in row.wrong for row in rows)]
    while fine and len(_INDENT) + _NAMES_WIDTH + sum(len(_GAP) + width for width in widths.values()) > _WIDTH:
        del widths[fine.pop()]
    return widths


def _is_address(who: str) -> bool:
    return "://" in who


def _names(groups: Sequence[Sequence[VersionRow]]) -> list[str]:
    """The label of each group: its hosts, or worker addresses if a host is in several groups."""
    hosts = [{_host(row.who) for row in group if _is_address(row.who)} for group in groups]
    names = []
    for index, group in enumerate(groups):
        if not _is_address(group[0].who):
            names.append(group[0].who)
            continue
        elsewhere = set().union(*(other for number, other in enumerate(hosts) if number != index))
        whose = dict.fromkeys(
            row.who.partition("://")[2] if _host(row.who) in elsewhere else _host(row.who) for row in group
        )
        names.append(f"{', '.join(folded([shorten(who) for who in whose]))} ({counted(len(group), 'worker')})")
    return names


def _host(address: str) -> str:
    """The host of an address, as tcp://10.0.0.1:40000 or tls://[::1]:40000."""
    location = address.partition("://")[2]
    return re.sub(r":\d+$", "", location)


def folded(names: Sequence[str]) -> list[str]:
    """Combine names that differ in one number only: node-1, node-2, node-4 become node-[1-2,4]."""
    split = [re.split(r"(\d+)", name) for name in names]
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for parts in split:
        alike.setdefault(tuple(parts[::2]), []).append(parts)
    return [name for group in alike.values() for name in _folded_at(group, _varying(group))]


def _varying(group: Sequence[Sequence[str]]) -> int | None:
    """The position of the last number in which the names of a group differ."""
    places = [place for place in range(1, len(group[0]), 2) if len({parts[place] for parts in group}) > 1]
    return places[-1] if places else None


def _folded_at(group: Sequence[Sequence[str]], place: int | None) -> list[str]:
    if place is None:
        return ["".join(group[0])]
    by_rest: dict[tuple[str, str], list[str]] = {}
    for parts in group:
        by_rest.setdefault(("".join(parts[:place]), "".join(parts[place + 1 :])), []).append(parts[place])
    return [f"{before}{_ranges(numbers)}{after}" for (before, after), numbers in by_rest.items()]


def _ranges(numbers: Sequence[str]) -> str:
    """The numbers as [1-3,7]; a single number has no brackets."""
    if len(numbers) == 1:
        return numbers[0]
    runs: list[list[str]] = []
    for number in sorted(numbers, key=lambda text: (len(text), text)):
        if runs and int(number) == int(runs[-1][-1]) + 1 and _is_next(runs[-1][-1], number):
            runs[-1].append(number)
        else:
            runs.append([number])
    return f"[{','.join(run[0] if len(run) == 1 else f'{run[0]}-{run[-1]}' for run in runs)}]"


def _is_next(number: str, following: str) -> bool:
    """Whether both have the same zero padding, so that a range is unambiguous."""
    return len(number) == len(following) or not (number.startswith("0") or following.startswith("0"))
