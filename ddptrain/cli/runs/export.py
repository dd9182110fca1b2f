"""`ddptrain results export`: writes the metrics of runs for other tools."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ddptrain.cli.printing import print_json, write
from ddptrain.cli.runs.choice import Json, RunNames, RunsDir, view_of


class ExportFormat(StrEnum):
    """The formats of `ddptrain results export`."""

    CSV = "csv"
    PARQUET = "parquet"
    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"


def export(
    ctx: typer.Context,
    runs: RunNames,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER|FILE|URL",
            help="Folder or file to write; a file has only the metrics; a URL is an MLflow server.",
        ),
    ],
    form: Annotated[ExportFormat, typer.Option("--format", help="Format of the files.")] = ExportFormat.CSV,
    runs_dir: RunsDir = None,
    json: Json = False,
) -> None:
    """Write the metrics of runs for other tools; files that exist are replaced.

    csv and parquet: metrics.csv has a row for each call of ctx.log; runs.csv has a row for each run, with its
    parameters and the last and best value of each metric. tensorboard: a folder for each run. mlflow: runs in a
    folder for MLflow, or on its server.
    """
    from ddptrain.errors import UsageError
    from ddptrain.results.export.mlflow import export_mlflow
    from ddptrain.results.export.tables import export_tables
    from ddptrain.results.export.tensorboard import export_tensorboard
    from ddptrain.results.run_store import NeededFiles

    views = [view_of(ctx, runs_dir, run, NeededFiles.COMPARISON) for run in dict.fromkeys(runs)]
    if form is ExportFormat.MLFLOW:
        written = [f"run {run_id}" for run_id in export_mlflow(views, output)]
    elif "://" in output:
        raise UsageError(f"cannot write {form} to {output}: give a folder; only MLflow has a server")
    elif form is ExportFormat.TENSORBOARD:
        written = [str(path) for path in export_tensorboard(views, Path(output))]
    else:
        written = [str(path) for path in export_tables(views, str(form), Path(output))]
    if json:
        print_json({"format": str(form), "written": written})
    else:
        write(written)
