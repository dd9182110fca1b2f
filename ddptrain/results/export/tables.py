"""Exports runs and their metrics as tables in CSV files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ddptrain.results.compare import flat
from ddptrain.results.export.output import output_file
from ddptrain.results.lookup import RunView
from ddptrain.results.metrics import MetricsReader, drop_replaced
from ddptrain.results.recorded_config import params_of
from ddptrain.results.selection import FIELDS, PARAMS, Field, RunFields

POSITION = ("run", "name", "rank", "attempt", "time_s", "step", "epoch")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet executes a cell that begins with one of these
Row = Mapping[str, Any]


def export_tables(views: Sequence[RunView], output: Path) -> list[Path]:
    """Write the tables as CSV files; return their paths.

    If `output` ends in .csv, it is a file, which gets the table of metrics only; otherwise it is a folder, which gets
    both tables.

    Raises UsageError, ResultsError.
    """
    is_file = output.suffix.lower() == ".csv"
    paths = [output if is_file else output / "metrics.csv"]
    names = metric_names(views)
    with output_file(paths[0]) as file:
        _write_csv(file, [*POSITION, *names.values()], (metric_rows(view, names) for view in views))
    if not is_file:
        paths.append(output / "runs.csv")
        rows = [run_row(view) for view in views]
        with output_file(paths[1]) as file:
            _write_csv(file, list(dict.fromkeys(name for row in rows for name in row)), [rows])
    return paths


def metric_names(views: Sequence[RunView]) -> dict[str, str]:
    """Return the names of the metrics of all runs, sorted, each with the title of its column."""
    names = {name for view in views for line in MetricsReader(view.layout.metrics_jsonl).read() for name in line.values}
    return {name: f"metrics.{name}" if name in POSITION else name for name in sorted(names)}


def metric_rows(view: RunView, names: Mapping[str, str]) -> list[Row]:
    """Return a row for each ctx.log call of a run, without values that a later attempt has replaced."""
    lines = drop_replaced(MetricsReader(view.layout.metrics_jsonl).read(), view.record.attempts)
    return [
        {
            "run": view.run_id,
            "name": view.record.name,
            "rank": line.rank,
            "attempt": line.attempt,
            "time_s": line.time_s,
            "step": line.step,
            "epoch": line.epoch,
            **{names[name]: value for name, value in line.values.items() if name in names},
        }
        for line in lines
    ]


def run_row(view: RunView) -> Row:
    """Return one row for a run: its fields, parameters, and the last and best value of each metric."""
    field_value = RunFields(view)
    row = {name: field_value(Field(name)) for name in FIELDS if name != "age"}
    row["tags"] = " ".join(row["tags"])
    row |= {PARAMS + name: value for name, value in flat(params_of(view))}
    for name, value in sorted(view.record.last_metrics.items()):
        row[f"last({name})"] = value
        if (best := field_value(Field(name, "best"))) is not None:
            row[f"best({name})"] = best
    return row


def _write_csv(file: BinaryIO, columns: Sequence[str], batches: Iterable[list[Row]]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_csv_cell(column) for column in columns])
    for rows in batches:
        writer.writerows([_csv_cell(row.get(column)) for column in columns] for row in rows)
    text.detach()


def _csv_cell(value: Any) -> Any:
    plain = _plain(value)
    return f"'{plain}" if isinstance(plain, str) and plain.startswith(_FORMULA) else plain


def _plain(value: Any) -> Any:
    """Return numbers and text as they are, and other values as JSON."""
    if value is None or isinstance(value, str | int | float):
        return value
    return json.dumps(value, default=str)
