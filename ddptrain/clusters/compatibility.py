"""Checks whether scheduler and workers of a cluster that ddptrain has not started have the packages that a run needs.

These processes may lack ddptrain or run another Python, so Dask itself is asked for versions. It imports nothing there.
"""

from __future__ import annotations

import re
from collections import Counter
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
_SCHEDULER = "scheduler"


def check_cluster(client: Client, workers: Sequence[str], *, own: bool = False) -> None:
    """Raise ClusterError, with a table of versions, if the scheduler or one of these workers does not fit or answer.

    own: the ranks have an environment of their own, so torch and what trains with it may differ.
    """
    try:
        answers: Any = client.sync(client.get_versions, packages=[*_PACKAGES], callback_timeout=_DEADLINE_S)
    except TimeoutError as error:
        raise ClusterError(
            f"the processes of the cluster do not all answer within {_DEADLINE_S:g} s: see their logs, and restart "
            "those that hang"
        ) from error
    driver = _versions(answers["client"])
    found = {_SCHEDULER: _versions(answers["scheduler"])}
    found |= {worker: _versions(answers["workers"][worker]) for worker in workers if worker in answers["workers"]}
    # The version of torch that all workers should have: the driver's if one has it, else the first.
    torches = [answer["torch"] for who, answer in found.items() if who != _SCHEDULER and answer["torch"]]
    torch = driver["torch"] if driver["torch"] in torches or not torches else torches[0]
    of_ranks = {"torch", "dask-pytorch-ddp"} if own else set()
    wrong = {who: _misfits(who, answer, {**driver, "torch": torch}) - of_ranks for who, answer in found.items()}
    if not any(wrong.values()):
        return
    rows = Counter([("driver", *(driver[column] or "-" for column in _COLUMNS))])
    for who, answer in found.items():
        place = who if who == _SCHEDULER else re.sub(r":\d+$", "", who.partition("://")[2])
        cells = ((answer[column] or "missing") + (" !" if column in wrong[who] else "") for column in _COLUMNS)
        rows[(shorten(place), *cells)] += 1
    lines = [
        (f"{row[0]} ({counted(count, 'worker')})" if count > 1 else row[0], *row[1:]) for row, count in rows.items()
    ]
    table = plain_table([("", *_COLUMNS), *lines]).rstrip()
    raise ClusterError(
        f"this cluster can't run the training (! marks what does not fit):\n{table}\n"
        f"{_advice(set().union(*wrong.values()), driver, torch)}"
    )


def _versions(answer: Mapping[str, Any]) -> dict[str, str | None]:
    python = ".".join(answer["host"]["python"].split(".")[:3])
    return {"python": python, **{name: answer["packages"].get(name) for name in _PACKAGES}}


def _misfits(who: str, answer: Mapping[str, str | None], driver: Mapping[str, str | None]) -> set[str]:
    """Return the columns that do not fit; the scheduler runs no ranks, and may lack torch and dask-pytorch-ddp."""
    fits = {
        "python": _numbers(answer["python"]) == _numbers(driver["python"]),
        "ddptrain": answer["ddptrain"] == driver["ddptrain"],
        "distributed": _numbers(answer["distributed"]) >= _OLDEST_DASK,
        "torch": who == _SCHEDULER or answer["torch"] == driver["torch"],
        "dask-pytorch-ddp": who == _SCHEDULER or answer["dask-pytorch-ddp"] is not None,
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
    install = " ".join(requirement for column, requirement in wanted.items() if column in wrong)
    python = f"use Python {'.'.join(map(str, _numbers(driver['python'])))} there" if "python" in wrong else ""
    steps = (python, install and f"install what is marked there (pip install {install}) and restart those processes")
    return f"To do: {'; '.join(filter(None, steps))}"
