"""`ddptrain retrain`: train a model anew, and make the result the champion if it is better."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated

import typer

from ddptrain.cli import complete
from ddptrain.cli import options as opt
from ddptrain.cli.train import reporting_of


def retrain(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            autocompletion=complete.configurations,
            help="YAML file with a section retrain, or the name of a shipped example.",
        ),
    ],
    overrides: Annotated[list[str] | None, opt.set_option("params.epochs=3")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Train although nothing has changed, or the data look wrong.")
    ] = False,
    slot: Annotated[
        str,
        typer.Option(
            metavar="TIME|SCHEDULE",
            help="The scheduled time, which is run at most once: 2026-03-01T03:00Z, or a cron expression as "
            '"0 3 * * 1 Europe/Berlin", which stands for its latest time.',
        ),
    ] = "",
    promote_anyway: Annotated[
        str, typer.Option(metavar="REASON", help="Promote the new version also if the gate rejects it.")
    ] = "",
    ranks: opt.RanksOption = None,
    cluster: opt.ClusterOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the data, print what would be done, change nothing.")
    ] = False,
    all_ranks: opt.AllRanksOption = False,
    output: opt.OutputOption = opt.OutputMode.AUTO,
    report: opt.ReportOption = None,
) -> None:
    """Train a model anew, and make the result the champion if it is better.

    It can be started at any time and from anywhere: one start at a time works on a model, and a start continues what
    an earlier one could not finish. Exit codes: 0 promoted, or nothing to do; 7 rejected by the gate; 8 out of time,
    the next start continues; others as of train.
    """
    from ddptrain.config.load import load_config

    options = opt.field_options(ranks, cluster, opt.PLACES.runs_dir)
    if (models_dir := opt.PLACES.models_dir) is not None:
        options[f"models.dir={json.dumps(models_dir)}"] = f"--models-dir {models_dir}"
    with reporting_of(config, report) as reporting:
        resolved = opt.checked(partial(load_config, opt.local_config(config)), overrides or [], options)
        from ddptrain.retrain.retraining import retrain as run
        from ddptrain.retrain.start import RetrainOptions
        from ddptrain.schedule.entries import resolve_slot

        reporting.name, reporting.secrets = resolved.config.name, resolved.secrets
        slot, anyway = resolve_slot(slot), promote_anyway.strip()
        chosen = RetrainOptions(
            force, slot, dry_run, output.value, anyway, opt.wants_full_traceback(), all_ranks, reporting
        )
        raise typer.Exit(run(resolved, chosen))
