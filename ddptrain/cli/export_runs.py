"""`ddptrain results export`: writes the metrics of runs for other tools."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ddptrain.cli.printing import print_json, write
from ddptrain.cli.run_choice import Json, RunNames, RunsDir, view_of


class ExportFormat(StrEnum):
    """The formats of `ddptrain results export`."""

    CSV = "csv"
    PARQUET = "parquet"
    TENSORBOARD = "tensorboard"


def export(
    ctx: typer.Context,
    runs: RunNames,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FOLDER|FILE", help="Where to write; a file takes the metrics alone."),
    ],
    form: Annotated[ExportFormat, typer.Option("--format", help="The form of the files.")] = ExportFormat.CSV,
    runs_dir: RunsDir = None,
    json: Json = False,
) -> None:
    """Write the metrics of runs for other tools; files that exist are replaced.

    csv and parquet: metrics.csv has a row for each call of ctx.log; runs.csv has a row for each run, with its
    parameters and the last and best value of each metric. tensorboard: a folder for each run.
    """
    from ddptrain.results.export.tables import export_tables
    from ddptrain.results.export.tensorboard import export_tensorboard
    from ddptrain.results.run_store import NeededFiles

    views = [view_of(ctx, runs_dir, run, NeededFiles.COMPARISON) for run in dict.fromkeys(runs)]
    if form is ExportFormat.TENSORBOARD:
        paths = export_tensorboard(views, output)
    else:
        paths = export_tables(views, str(form), output)
    if json:
        print_json({"format": str(form), "files": [str(path) for path in paths]})
    else:
        write([str(path) for path in paths])
