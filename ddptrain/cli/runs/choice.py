"""The arguments with which the commands of `ddptrain results` choose runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ddptrain.cli import complete

if TYPE_CHECKING:
    from ddptrain.results.lookup import RunView
    from ddptrain.results.remote.runs import RunsDir as Runs
    from ddptrain.results.run_store import NeededFiles

DEFAULT_RUNS_DIR = "runs"

RunsDir = Annotated[
    str | None,
    typer.Option(
        "--runs-dir",
        metavar="DIR|URL",
        # Not show_default: the default of this parameter is None.
        help=f"Folder that holds the runs, or s3://bucket/folder.  [default: {DEFAULT_RUNS_DIR}]",
    ),
]
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


def folder_of(ctx: typer.Context, runs_dir: str | None) -> str:
    """Return the runs folder: of the command's option, or else of `ddptrain results --runs-dir`."""
    given_before = ctx.obj if isinstance(ctx.obj, str) else None
    return runs_dir or given_before or DEFAULT_RUNS_DIR


def place_of(ctx: typer.Context, runs_dir: str | None, run: str) -> tuple[Runs, str]:
    """Return the runs folder to search, and the name of the run."""
    from ddptrain.results.remote.runs import open_runs_dir, split_run

    place, name = split_run(run, folder_of(ctx, runs_dir))
    return open_runs_dir(place), name


def view_of(
    ctx: typer.Context, runs_dir: str | None, run: str, need: NeededFiles | None = None, checkpoint: str = "best"
) -> RunView:
    """Return the run of that name, with a copy of the files that are needed if it is in a store. Raises RunNotFound."""
    runs, name = place_of(ctx, runs_dir, run)
    return runs.find(name) if need is None else runs.find(name, need, checkpoint=checkpoint)
