"""Checks whether scheduler and workers of a cluster that ddptrain has not started can run a workload.

These processes may lack ddptrain or run another Python. So the probe is sent as source text for `eval`, and the answer
is JSON. The result is one table of what does not fit.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddptrain.clusters import compatibility_probe
from ddptrain.config.wording import counted, shorten
from ddptrain.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Client

_DEADLINE_S = 10.0
_OLDEST_DASK = (2025, 7)
_PACKAGES = ("ddptrain", "torch", "distributed", "dask-pytorch-ddp")
_DRIVER, _SCHEDULER = "driver", "scheduler"
_OF_RANKS = ("torch", "dask-pytorch-ddp", "workload")  # the scheduler runs no ranks and may lack them
_WIDTH = 90  # 100 with the prefix that the display adds to each line
_INDENT = "  "
_GAP = "  "
_MARK = " !"
_VALUE_WIDTH = 12
_NAMES_WIDTH = 26  # if names need more, columns without errors are left out first
_LEAST_NAMES_WIDTH = 12
_MOST_OF_A_REASON = 400


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run needs on every worker: the workload as module:attr, installed or in one of these folders."""

    workload: str
    sys_path: tuple[str, ...]

    @property
    def module(self) -> str:
        """The module of the workload."""
        return self.workload.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Answers:
    """The answer of each process, by its name: the value of each column (None: missing), or why there is no answer."""

    versions: Mapping[str, Mapping[str, str | None]]
    failed: Mapping[str, str]


def check_cluster(client: Client, workers: Sequence[str], needs: Needs) -> None:
    """Raise ClusterError, with a table of versions, if a process does not fit or answer; workers may leave."""
    arguments = (_PACKAGES, needs.module, needs.sys_path)
    driver = json.loads(compatibility_probe.look(*arguments))
    answers = client.sync(_ask, client, workers, _expression(*arguments))
    wrong = judge(answers.versions, driver)
    if answers.failed or any(wrong.values()):
        raise ClusterError(_message(answers, wrong, driver, needs))


def _expression(*arguments: object) -> str:
    """Return the probe as one expression for `eval`, which every Python has and pickle sends by name."""
    names = {"__name__": "ddptrain.probe"}
    source = inspect.getsource(compatibility_probe)
    return f"(lambda names: (exec({source!r}, names), names['look'](*{arguments!r}))[1])({names!r})"


async def _ask(client: Client, workers: Sequence[str], expression: str) -> Answers:
    """Ask each process separately: a silent process must not delay the answers of the others."""
    asked = {_SCHEDULER: asyncio.ensure_future(client.run_on_scheduler(eval, expression))}
    for worker in workers:
        asked[worker] = asyncio.ensure_future(client.run(eval, expression, workers=[worker]))
    await asyncio.wait(asked.values(), timeout=_DEADLINE_S)
    versions, failed = {}, {}
    for who, answer in asked.items():
        if not answer.done():
            answer.cancel()
            failed[who] = f"no answer within {_DEADLINE_S:g} s"
        elif (error := answer.exception()) is not None:
            failed[who] = f"could not be asked: {type(error).__name__}: {error}"
        else:
            text = answer.result() if who == _SCHEDULER else answer.result()[who]
            versions[who] = json.loads(text)
    if failed and _SCHEDULER not in failed:
        present = await client.nthreads()
        failed = {who: reason for who, reason in failed.items() if who in present}
    return Answers(versions, failed)


def judge(
    versions: Mapping[str, Mapping[str, str | None]], driver: Mapping[str, str | None]
) -> dict[str, frozenset[str]]:
    """Return the columns that do not fit, by process."""
    torch = _usual_torch(versions, driver["torch"])
    wrong = {}
    for who, answer in versions.items():
        fits = {
            "Python": _numbers(answer["Python"]) == _numbers(driver["Python"]),
            "ddptrain": answer["ddptrain"] == driver["ddptrain"],
            "distributed": _numbers(answer["distributed"]) >= _OLDEST_DASK,
        }
        if who != _SCHEDULER:
            fits |= {column: answer[column] is not None for column in _OF_RANKS}
            fits["torch"] = answer["torch"] is not None and answer["torch"] == torch
        wrong[who] = frozenset(column for column, is_fine in fits.items() if not is_fine)
    return wrong


def _usual_torch(versions: Mapping[str, Mapping[str, str | None]], of_driver: str | None) -> str | None:
    """Return the version that all workers should have: the driver's if a worker has it, else the most frequent one."""
    counts = Counter(answer["torch"] for who, answer in versions.items() if who != _SCHEDULER and answer["torch"])
    return of_driver if of_driver in counts or not counts else counts.most_common(1)[0][0]


def _numbers(version: str | None) -> tuple[int, ...]:
    """Return the first two parts: the minor version of Python, year and month of Dask."""
    return tuple(int(part) for part in re.findall(r"\d+", version or "0")[:2])


def _message(
    answers: Answers, wrong: Mapping[str, frozenset[str]], driver: Mapping[str, str | None], needs: Needs
) -> str:
    rows = [VersionRow(_DRIVER, _cells(driver, needs, _OF_RANKS))]
    for who, answer in answers.versions.items():
        rows.append(VersionRow(who, _cells(answer, needs, _OF_RANKS if who == _SCHEDULER else ()), wrong[who]))
    rows += [VersionRow(who, {}, reason=reason) for who, reason in answers.failed.items()]
    advice = _advice(answers, frozenset().union(*wrong.values()), driver, needs)
    return table("this cluster can't run the training (! marks what does not fit):", rows, advice)


def _cells(answer: Mapping[str, str | None], needs: Needs, optional: Sequence[str]) -> dict[str, str]:
    """Return the cells of the row; the workload column is left out if it would only repeat that of ddptrain."""
    missing = {column: "-" if column in optional else "missing" for column in answer}
    cells = {column: value or missing[column] for column, value in answer.items()}
    if needs.module.partition(".")[0] == "ddptrain":
        del cells["workload"]
    return cells


def _advice(answers: Answers, wrong: frozenset[str], driver: Mapping[str, str | None], needs: Needs) -> str:
    """Return the line that says what to do."""
    torch = _usual_torch(answers.versions, driver["torch"])
    wanted = {
        "ddptrain": f"ddptrain=={driver['ddptrain']}",
        "torch": f"torch=={torch.partition('+')[0]}" if torch else "torch",
        "distributed": f"'distributed>={'.'.join(map(str, _OLDEST_DASK))}'",
        "dask-pytorch-ddp": "dask-pytorch-ddp",
    }
    install = [requirement for column, requirement in wanted.items() if column in wrong]
    steps = []
    if answers.failed:
        steps.append("see the logs of those that did not answer, and restart them")
    if "Python" in wrong:
        python = ".".join(map(str, _numbers(driver["Python"])))
        steps.append(f"use Python {python} there, or their version for the driver")
    if install:
        steps.append(f"install what is marked there (pip install {' '.join(install)}) and restart those processes")
    if "workload" in wrong and needs.module.partition(".")[0] != "ddptrain":
        steps.append(
            f"make the module {needs.module} importable on the workers: install it, or share the folder "
            f"{' or '.join(dict.fromkeys(needs.sys_path))} with them"
        )
    return "To do: " + "; ".join(steps)


# --- The table: processes with equal answers share a row; values that do not fit are marked. ---


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One process: its value in each column, or the `reason` for no answer; the columns in `wrong` are marked."""

    who: str
    cells: Mapping[str, str]
    wrong: frozenset[str] = frozenset()
    reason: str = ""


def table(title: str, rows: Sequence[VersionRow], below: str) -> str:
    """Return the lines of the table, at most 90 characters wide if possible. Workers with equal values share a row."""
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
    """Return the lines of one row; a name that is too long for its column gets its own line."""
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
    """Return the label of each group: its hosts, or worker addresses if a host is in several groups."""
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
    """Return the host of an address, as tcp://10.0.0.1:40000 or tls://[::1]:40000."""
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
    """Return the position of the last number in which the names of a group differ."""
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
    """Return the numbers as [1-3,7]; a single number has no brackets."""
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
    """Return whether both have the same zero padding, so that a range is unambiguous."""
    return len(number) == len(following) or not (number.startswith("0") or following.startswith("0"))
