"""`ddptrain watch RUN`: shows a run that another shell or host started."""

from __future__ import annotations

from typing import Annotated

import typer

from ddptrain.cli import options as opt
from ddptrain.cli.runs.choice import Run, place_of


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
    from ddptrain.results.sweep_record import find_sweep

    mode = output.value
    if (sweep := find_sweep(opt.PLACES.runs, run)) is not None:
        from ddptrain.sweep.watch import watch_sweep

        raise typer.Exit(watch_sweep(sweep, mode))
    runs, name = place_of(run)
    raise typer.Exit(show(runs, runs.find(name), WatchOptions(mode, lines, all_ranks)))
