"""Checks whether scheduler and workers of a cluster that ddptrain has not started can run a workload.

These processes may lack ddptrain or run another Python. So the probe is sent as source text for `eval`, and the answer
is JSON. The result is one table of what does not fit.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddptrain.clusters import compatibility_probe
from ddptrain.clusters.compatibility_table import VersionRow, table
from ddptrain.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Client

_DEADLINE_S = 10.0
_OLDEST_DASK = (2025, 7)
_PACKAGES = ("ddptrain", "torch", "distributed", "dask-pytorch-ddp")
_DRIVER, _SCHEDULER = "driver", "scheduler"
_OF_RANKS = ("torch", "dask-pytorch-ddp", "workload")  # the scheduler runs no ranks and may lack them


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
    """Check the scheduler and these workers; a worker that has left meanwhile is ignored.

    Raises ClusterError with a table of all versions if one does not fit, or does not answer within 10 s.
    """
    arguments = (_PACKAGES, needs.module, needs.sys_path)
    driver = json.loads(compatibility_probe.look(*arguments))
    answers = client.sync(_ask, client, workers, _expression(*arguments))
    wrong = judge(answers.versions, driver)
    if answers.failed or any(wrong.values()):
        raise ClusterError(_message(answers, wrong, driver, needs))


def _expression(*arguments: object) -> str:
    """The probe as one expression for `eval`, which every Python has and pickle sends by name."""
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
    """For each process, the columns that do not fit."""
    torch = _usual_torch([answer["torch"] for who, answer in versions.items() if who != _SCHEDULER], driver["torch"])
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


def _usual_torch(of_workers: Sequence[str | None], of_driver: str | None) -> str | None:
    """The version that all workers should have: the driver's if a worker has it, else the most frequent one."""
    counts = Counter(version for version in of_workers if version is not None)
    return of_driver if of_driver in counts or not counts else counts.most_common(1)[0][0]


def _numbers(version: str | None) -> tuple[int, ...]:
    """The first two parts: the minor version of Python, year and month of Dask."""
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
    """The cells of the row; the workload column is left out if it would only repeat that of ddptrain."""
    missing = {column: "-" if column in optional else "missing" for column in answer}
    cells = {column: value or missing[column] for column, value in answer.items()}
    if needs.module.partition(".")[0] == "ddptrain":
        del cells["workload"]
    return cells


def _advice(answers: Answers, wrong: frozenset[str], driver: Mapping[str, str | None], needs: Needs) -> str:
    """The line that says what to do."""
    torch = _usual_torch(
        [answer["torch"] for who, answer in answers.versions.items() if who != _SCHEDULER], driver["torch"]
    )
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
