"""Logs checkpoints and tables of a run directory as artifacts of a W&B run, for `results sync`.

stdin has a RunArtifacts (sync_command.py) as a JSON object, with `timeout_s`. An error is printed like one of wandb's.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import wandb

from ddptrain.tracking import items
from ddptrain.tracking.wandb.wandb_artifacts import checkpoint_aliases, checkpoint_artifact, to_table_artifact
from ddptrain.tracking.wandb.wandb_run import RunOptions, open_run, reason_of, stop_service

_OPEN_SHARE = 0.5  # of the time, for opening the run


def main() -> int:
    """Return the exit code."""
    request = json.load(sys.stdin)
    try:
        run = open_run(_options(request))
        print(run.url)
        for artifact in [_log_table(run, request, *table) for table in request["tables"]] + [
            _log_checkpoint(run, request, *checkpoint) for checkpoint in request["checkpoints"]
        ]:
            artifact.wait()
        run.finish(exit_code=request["exit_code"])
    except (Exception, SystemExit) as error:  # wandb raises many types, and exits with its service
        print(f"ERROR {reason_of(error)}")
        return 1
    finally:
        stop_service()
    return 0


def _options(request: dict[str, Any]) -> RunOptions:
    names = {"project": "project", "entity": "entity", "name": "run_name", "group": "run_group"}
    settings = {setting: request[name] or None for name, setting in names.items()} | {"x_disable_stats": True}
    timeout_s = float(request["timeout_s"])
    return RunOptions(
        "online", request["run_id"], Path.cwd() / "wandb", None, _OPEN_SHARE * timeout_s, timeout_s, settings
    )


def _log_checkpoint(run: wandb.Run, request: dict[str, Any], step: int, metrics: Any, files: list[str]) -> Any:
    paths = [Path(request["root"]) / file for file in files]
    artifact = checkpoint_artifact(request["ddptrain_run"], step, metrics, paths)
    return run.log_artifact(artifact, aliases=checkpoint_aliases(step))


def _log_table(run: wandb.Run, request: dict[str, Any], name: str, step: int | None, path: str) -> Any:
    root, max_rows = Path(request["root"]), int(request["table_rows"])
    columns, rows = _read(root / path, max_rows)
    cells = tuple(tuple(_cell(root / "artifacts", value) for value in row) for row in rows)
    table = items.Table(0, name, tuple(columns), cells, step)
    return run.log_artifact(to_table_artifact(table, max_rows, request["ddptrain_run"], int(request["rank"])))


def _read(path: Path, max_rows: int) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and the first rows of a table of ctx.log_table."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        columns = next(reader, [])
        rows = [row for row, _ in zip(reader, range(max_rows), strict=False)]
    return columns, [list(row) for row in zip(*map(_numbers, zip(*rows, strict=True)), strict=True)]


def _numbers(column: tuple[str, ...]) -> list[Any]:
    """Return a column of a CSV file as numbers, if all of its values are numbers or missing; else as it is."""
    try:
        return [float(value) if value else None for value in column]
    except ValueError:
        return list(column)


def _cell(artifacts: Path, value: Any) -> Any:
    """Return the image for the path of an image in the run directory; other values as they are."""
    if isinstance(value, str) and value.startswith("images/") and value.endswith(".png"):
        path = artifacts / value
        if path.is_file() and path.resolve() == artifacts.resolve() / value:
            return items.Image(0, value, path)
    return value


if __name__ == "__main__":
    sys.exit(main())
