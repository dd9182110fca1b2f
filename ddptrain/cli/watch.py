"""`ddptrain watch RUN`: shows a run that another shell or host started."""

from __future__ import annotations

from typing import Annotated

import typer

from ddptrain.cli import options as opt
from ddptrain.cli.runs.choice import Run, place_of
from ddptrain.errors import RunNotFound


def watch(
    run: Run,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Earlier lines to show of each rank.")] = 10,
    all_ranks: opt.AllRanksOption = False,
    output: opt.OutputOption = opt.OutputMode.AUTO,
) -> None:
    """Show a run or a sweep that another shell started, as train and sweep show it, until it has ended.

    The exit code is that of the run; 4 if its driver was killed. Ctrl-C ends only the watching, with exit code 130:
    the run goes on. Of a run that has ended it shows the end.
    """
    from ddptrain.driver.watch import WatchOptions
    from ddptrain.driver.watch import watch as show

    mode = output.value
    runs, name = place_of(run)
    try:
        view = runs.find(name)
    except RunNotFound:
        from ddptrain.sweep.stop import find_target
        from ddptrain.sweep.watch import watch_sweep

        folder = opt.PLACES.runs
        if (sweep := find_target(folder, run)) is None:
            raise
        where = run.rstrip("/") if "/" in run else f"{folder.rstrip('/')}/{run}"
        raise typer.Exit(watch_sweep(sweep, where, mode)) from None
    raise typer.Exit(show(runs, view, WatchOptions(mode, lines, all_ranks)))
