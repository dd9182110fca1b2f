"""Whether the scheduler and the workers of a cluster of others can run this: one table of what does not fit.

They may lack ddptrain or run another Python, so nothing of ours is sent to them: the probe is text that their own
`eval` reads, and JSON comes back.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddptrain.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Client

_DEADLINE_S = 20.0
_OLDEST_DASK = (2025, 7)
_PACKAGES = ("ddptrain", "torch", "distributed", "dask-pytorch-ddp")
_MISSING = "missing"
_MOST_HOSTS = 3  # named in a row

# Python 3.9 and newer. The workload's module is looked for, not imported: that would bring torch into the worker.
_PROBE = """
import importlib.metadata, importlib.util, json, os, platform, sys, importlib.machinery
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
def found(name, folders):
    if importlib.machinery.PathFinder.find_spec(name, list(folders)) is not None:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return name in sys.modules
answer = json.dumps({
    "python": platform.python_version(),
    "packages": {name: version(name) for name in PACKAGES},
    "workload": found(MODULE, FOLDERS),
})
"""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run needs of every worker: the workload's module:attr, to be found in these folders or installed."""

    workload: str
    sys_path: tuple[str, ...]

    @property
    def module(self) -> str:
        """The top-level module of the workload."""
        return self.workload.partition(":")[0].partition(".")[0]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one process told: versions by name (None: not installed); `workload` None is not asked of it."""

    who: str
    python: str
    packages: Mapping[str, str | None]
    workload: bool | None

    @property
    def minor(self) -> str:
        """As 3.11."""
        return ".".join(self.python.split(".")[:2])


def check_cluster(client: Client, workers: Sequence[str], needs: Needs) -> None:
    """Ask the scheduler and these workers whether they can run this. Raises ClusterError with a table where not."""
    expression = _expression(needs)
    scheduler = _asked(client, lambda: {"scheduler": client.run_on_scheduler(eval, expression)})
    answers = [_answer("scheduler", text, of_worker=False) for text in scheduler.values()]
    if workers:
        told = _asked(client, lambda: client.run(eval, expression, workers=list(workers), on_error="return"))
        answers += [_answer(worker, told.get(worker), of_worker=True) for worker in workers]
    driver = _driver()
    problems = [_problems(answer, driver, answers) for answer in answers]
    if any(problems):
        raise ClusterError(_table(driver, answers, problems, needs))


def _expression(needs: Needs) -> str:
    """The probe as one expression for `eval`."""
    names = {"PACKAGES": _PACKAGES, "MODULE": needs.module, "FOLDERS": needs.sys_path}
    return f"(lambda names: (exec({_PROBE!r}, names), names['answer'])[1])({names!r})"


def _asked(client: Client, ask: Any) -> Mapping[str, Any]:
    """What `ask` returns. Raises ClusterError where no answer comes in time, or it is refused."""
    import concurrent.futures
    import threading

    outcome: concurrent.futures.Future[Mapping[str, Any]] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(ask())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="ddptrain-check", daemon=True).start()
    address = client.scheduler.address if client.scheduler is not None else "?"
    try:
        return outcome.result(_DEADLINE_S)
    except TimeoutError:
        raise ClusterError(
            f"the cluster at {address} did not tell its versions within {_DEADLINE_S:g} s: is a worker of it "
            "unreachable, or busy?"
        ) from None
    except Exception as error:
        raise ClusterError(f"the cluster at {address} could not be asked for its versions: {error}") from error


def _answer(who: str, told: object, *, of_worker: bool) -> Answer:
    if not isinstance(told, str):
        raise ClusterError(f"{who} could not be asked for its versions: {told if told is not None else 'no answer'}")
    data = json.loads(told)
    return Answer(who, data["python"], data["packages"], data["workload"] if of_worker else None)


def _driver() -> Answer:
    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return Answer("driver", platform.python_version(), {name: version(name) for name in _PACKAGES}, None)


def _problems(answer: Answer, driver: Answer, answers: Sequence[Answer]) -> frozenset[str]:
    """The columns in which a process does not fit."""
    wrong = set()
    is_worker = answer.workload is not None
    if answer.minor != driver.minor:
        wrong.add("Python")
    if answer.packages["ddptrain"] != driver.packages["ddptrain"]:
        wrong.add("ddptrain")
    if _year_and_month(answer.packages["distributed"]) < _OLDEST_DASK:
        wrong.add("distributed")
    if is_worker:
        wrong |= {name for name in ("torch", "dask-pytorch-ddp") if answer.packages[name] is None}
        if len({other.packages["torch"] for other in answers if other.workload is not None}) > 1:
            wrong.add("torch")
        if not answer.workload:
            wrong.add("workload")
    return frozenset(wrong)


def _year_and_month(version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version or "0")[:2])


def _table(driver: Answer, answers: Sequence[Answer], problems: Sequence[frozenset[str]], needs: Needs) -> str:
    groups: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    for answer, wrong in zip(answers, problems, strict=True):
        groups.setdefault((_cells(answer, wrong), answer.workload is None), []).append(answer.who)
    header = ("", "Python", *_PACKAGES, needs.module)
    rows = [header, ("driver", *_cells(driver, frozenset()))]
    rows += [(_names(whose), *cells) for (cells, _), whose in groups.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return (
        "the cluster can't run this (! is what does not fit):\n"
        + "\n".join(f"  {line}" for line in lines)
        + _advice(problems, driver, needs)
    )


def _cells(answer: Answer, wrong: frozenset[str]) -> tuple[str, ...]:
    mark = {name: " !" if name in wrong else "" for name in ("Python", *_PACKAGES, "workload")}
    versions = [f"{answer.packages[name] or _MISSING}{mark[name]}" for name in _PACKAGES]
    found = "" if answer.workload is None else ("found" if answer.workload else f"{_MISSING}{mark['workload']}")
    return (f"{answer.python}{mark['Python']}", *versions, found)


def _names(whose: Sequence[str]) -> str:
    """Some workers in short: their hosts, and how many they are."""
    if len(whose) == 1:
        return whose[0]
    hosts = list(dict.fromkeys(re.sub(r"^\w+://|:\d+$", "", who) for who in whose))
    more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
    return f"{', '.join(hosts[:_MOST_HOSTS])}{more} ({len(whose)} processes)"


def _advice(problems: Iterable[frozenset[str]], driver: Answer, needs: Needs) -> str:
    wrong = frozenset().union(*problems)
    install = [
        f"ddptrain=={driver.packages['ddptrain']}" if name == "ddptrain" else name
        for name in ("ddptrain", "dask-pytorch-ddp", "torch", "distributed")
        if name in wrong
    ]
    advice = []
    if "Python" in wrong:
        advice.append(f"use Python {driver.minor} there, or theirs here")
    if install:
        advice.append(f"in the environment of those processes: pip install {' '.join(install)}")
    if "workload" in wrong:
        advice.append(
            f"install the module {needs.module} there, or put it into a folder that they share with this host"
        )
    return "".join(f"\n{line}" for line in advice)
