"""Checks whether scheduler and workers of a cluster that ddptrain has not started have the packages that a run needs.

These processes may lack ddptrain or run another Python, so Dask itself is asked for versions. It imports nothing there.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddptrain.config.wording import counted, shorten
from ddptrain.errors import ClusterError
from ddptrain.text_tables import plain_table

if TYPE_CHECKING:
    from distributed import Client

_DEADLINE_S = 10.0
_OLDEST_DASK = (2025, 7)
_PACKAGES = ("ddptrain", "torch", "distributed", "dask-pytorch-ddp")
_COLUMNS = ("python", *_PACKAGES)
_OF_RANKS = frozenset({"torch", "dask-pytorch-ddp"})  # the scheduler runs no ranks and may lack them
_SCHEDULER = "scheduler"


def check_cluster(client: Client, workers: Sequence[str]) -> None:
    """Raise ClusterError, with a table of versions, if a process does not fit or answer; workers may leave."""
    try:
        found = client.sync(_ask, client, workers)
    except TimeoutError as error:
        raise ClusterError(f"the processes of the cluster do not answer within {_DEADLINE_S:g} s") from error
    driver = found.pop("driver")
    # The version of torch that all workers should have: the driver's if one has it, else the first.
    torches = [answer["torch"] for who, answer in found.items() if who != _SCHEDULER and answer and answer["torch"]]
    torch = driver["torch"] if driver["torch"] in torches or not torches else torches[0]
    wrong = {who: _misfits(who, answer, {**driver, "torch": torch}) for who, answer in found.items()}
    if not any(wrong.values()):
        return
    rows = {("driver", *(driver[column] or "-" for column in _COLUMNS)): 1}
    for who, answer in found.items():
        place = who if who == _SCHEDULER else re.sub(r":\d+$", "", who.partition("://")[2])
        cells = ((answer or {}).get(column) or "missing" for column in _COLUMNS) if answer else ["no answer"] * 5
        marked = (f"{cell} !" if column in wrong[who] else cell for column, cell in zip(_COLUMNS, cells, strict=True))
        row = (shorten(place), *marked)
        rows[row] = rows.get(row, 0) + 1
    lines = [
        (f"{row[0]} ({counted(count, 'worker')})" if count > 1 else row[0], *row[1:]) for row, count in rows.items()
    ]
    table = plain_table([("", *_COLUMNS), *lines]).rstrip()
    raise ClusterError(
        f"this cluster can't run the training (! marks what does not fit):\n{table}\n"
        f"{_advice(set().union(*wrong.values()), driver, torch)}"
    )


async def _ask(client: Client, workers: Sequence[str]) -> dict[str, Any]:
    """Return the versions of each process, None for one without an answer. Each is asked for itself: one may hang."""

    async def versions(call: Any) -> dict[str, str | None] | None:
        try:
            answer: Mapping[str, Any] = await asyncio.wait_for(call, _DEADLINE_S)
        except (TimeoutError, OSError):
            return None
        found = next(iter(answer.values())) if "packages" not in answer else answer
        if not isinstance(found, Mapping) or "packages" not in found:
            return None
        python = ".".join(found["host"]["python"].split(".")[:3])
        return {"python": python, **{name: found["packages"].get(name) for name in _PACKAGES}}

    from distributed.versions import get_versions

    scheduler: Any = client.scheduler
    calls = {_SCHEDULER: versions(scheduler.versions(packages=_PACKAGES))}
    for worker in workers:
        message = {"op": "versions", "packages": _PACKAGES}
        calls[worker] = versions(scheduler.broadcast(msg=message, workers=[worker], on_error="return"))
    answers = dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
    if None in answers.values():
        present = await client.nthreads()  # who has left meanwhile is not missed
        answers = {who: found for who, found in answers.items() if found or who == _SCHEDULER or who in present}

    async def here() -> Mapping[str, Any]:
        return get_versions(packages=_PACKAGES)

    return {**answers, "driver": await versions(here())}


def _misfits(who: str, answer: Mapping[str, str | None] | None, driver: Mapping[str, str | None]) -> set[str]:
    """Return the columns that do not fit."""
    if answer is None:
        return set(_COLUMNS)
    fits = {
        "python": _numbers(answer["python"]) == _numbers(driver["python"]),
        "ddptrain": answer["ddptrain"] == driver["ddptrain"],
        "distributed": _numbers(answer["distributed"]) >= _OLDEST_DASK,
    }
    if who != _SCHEDULER:
        fits |= {
            "torch": answer["torch"] == driver["torch"],
            "dask-pytorch-ddp": answer["dask-pytorch-ddp"] is not None,
        }
    return {column for column, is_fine in fits.items() if not is_fine}


def _numbers(version: str | None) -> tuple[int, ...]:
    """Return the first two parts: the minor version of Python, year and month of Dask."""
    return tuple(int(part) for part in re.findall(r"\d+", version or "0")[:2])


def _advice(wrong: set[str], driver: Mapping[str, str | None], torch: str | None) -> str:
    wanted = {
        "ddptrain": f"ddptrain=={driver['ddptrain']}",
        "torch": f"torch=={torch.partition('+')[0]}" if torch else "torch",
        "distributed": f"'distributed>={'.'.join(map(str, _OLDEST_DASK))}'",
        "dask-pytorch-ddp": "dask-pytorch-ddp",
    }
    steps = ["see the logs of those that did not answer, and restart them"] if wrong == set(_COLUMNS) else []
    if "python" in wrong and not steps:
        version = ".".join(map(str, _numbers(driver["python"])))
        steps.append(f"use Python {version} there, or their version for the driver")
    if (install := [requirement for column, requirement in wanted.items() if column in wrong]) and len(install) < 4:
        steps.append(f"install what is marked there (pip install {' '.join(install)}) and restart those processes")
    return f"To do: {'; '.join(steps)}"
