"""`ddptrain sweep CONFIG`: search for the best values of some fields."""

from __future__ import annotations

import functools
from typing import Annotated

import typer

from ddptrain.cli import complete
from ddptrain.cli import options as opt
from ddptrain.errors import UsageError


def sweep(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG",
            autocompletion=complete.configurations,
            help="YAML file with a section sweep, or the name of a shipped example; --resume needs none.",
        ),
    ] = None,
    overrides: Annotated[list[str] | None, opt.set_option("sweep.trials=64")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the newest sweep of this name, or the one of --sweep-id.")
    ] = False,
    sweep_id: Annotated[str | None, typer.Option(help="Name of the sweep's folder; by default one is made.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks of each trial (sweep.ranks).")] = None,
    cluster: opt.ClusterOption = None,
    output: opt.OutputOption = opt.OutputMode.AUTO,
) -> int:
    """Search for the best values of some fields: many trials, each an ordinary run, on one cluster.

    Exit codes: 0 at least one trial is complete; 1 no trial is, or the same failure has happened three times; 75
    after SIGTERM, 130 after Ctrl-C: --resume goes on; others as of train.

    Examples:
        ddptrain sweep petnames-sweep --set sweep.trials=16
        ddptrain sweep sweep.yaml --resume
    """
    from ddptrain.config.load import load_config

    options = opt.field_options(None, cluster, opt.PLACES.runs_dir)
    if ranks is not None:
        options[f"sweep.ranks={ranks}"] = f"--ranks {ranks}"
    if config is None and not resume:
        raise UsageError("name the configuration: ddptrain sweep CONFIG, or continue a sweep: ddptrain sweep --resume")
    from ddptrain.sweep.home import last_source
    from ddptrain.sweep.sweep import SweepOptions, run_sweep

    if config is None:
        config = last_source(opt.PLACES.runs, sweep_id)
    load = functools.partial(load_config, opt.local_config(config), sweeps=True)
    resolved = opt.checked(load, overrides or [], options)
    return run_sweep(resolved, SweepOptions(sweep_id, resume, output.value))
