"""The arguments with which the commands of `ddptrain results` choose runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ddptrain.cli import complete
from ddptrain.cli.options import PLACES

if TYPE_CHECKING:
    from ddptrain.results.lookup import RunView
    from ddptrain.results.runs import NeededFiles
    from ddptrain.results.runs import RunsDir as Runs

RunNames = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN",
        autocompletion=complete.runs,
        help="A run's id, the start of one, latest, a directory, or a URL.",
    ),
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        autocompletion=complete.runs,
        help="A run's id, the start of one, latest, a directory, or a URL.",
    ),
]


def place_of(run: str) -> tuple[Runs, str]:
    """Return the runs folder to search, and the name of the run."""
    from ddptrain.results.runs import open_runs_dir, split_run

    place, name = split_run(run, PLACES.runs)
    return open_runs_dir(place), name


def view_of(run: str, need: NeededFiles | None = None, checkpoint: str = "best") -> RunView:
    """Return the run of that name, with a copy of the files that are needed if it is in a store. Raises RunNotFound."""
    runs, name = place_of(run)
    return runs.find(name) if need is None else runs.find(name, need, checkpoint=checkpoint)
