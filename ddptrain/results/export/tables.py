"""Exports runs and their metrics as tables in CSV or Parquet files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ddptrain.errors import UsageError
from ddptrain.optional_packages import install_command
from ddptrain.results.compare.differences import flat
from ddptrain.results.export.output import encodable, output_file
from ddptrain.results.lookup import RunView
from ddptrain.results.metrics import MetricsReader, drop_replaced, is_number
from ddptrain.results.select.expression import Field
from ddptrain.results.select.fields import FIELDS, PARAMS, RunFields
from ddptrain.results.select.recorded_config import params_of

POSITION = ("run", "name", "rank", "attempt", "time_s", "step", "epoch")
_TEXTS = ("run", "name")
_INTEGERS = ("rank", "attempt")
_INT64_END = 1 << 63
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet executes a cell that begins with one of these
Row = Mapping[str, Any]
_Write = Callable[[BinaryIO, Sequence[str], Iterable[list[Row]]], None]


def export_tables(views: Sequence[RunView], file_format: str, output: Path) -> list[Path]:
    """Write the tables as "csv" or "parquet" files; return their paths.

    If `output` ends in .csv or .parquet, it is a file, which gets the table of metrics only; otherwise it is a folder,
    which gets both tables.

    Raises UsageError, ResultsError.
    """
    write = _writer_of(file_format)
    is_file = output.suffix.lower() in (".csv", ".parquet")
    if is_file and output.suffix.lower() != f".{file_format}":
        raise UsageError(
            f"cannot write {file_format} into {output}: give a name that ends in .{file_format}, or a folder"
        )
    paths = [output if is_file else output / f"metrics.{file_format}"]
    names = metric_names(views)
    with output_file(paths[0]) as file:
        write(file, [*POSITION, *names.values()], (metric_rows(view, names) for view in views))
    if not is_file:
        paths.append(output / f"runs.{file_format}")
        rows = [run_row(view) for view in views]
        with output_file(paths[1]) as file:
            write(file, list(dict.fromkeys(name for row in rows for name in row)), [rows])
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


def _writer_of(file_format: str) -> _Write:
    if file_format == "csv":
        return _write_csv
    try:
        import pyarrow.parquet as pq  # noqa: F401
    except ImportError:
        raise UsageError(f"parquet needs pyarrow: {install_command('parquet')}, or choose --format csv") from None
    return _write_parquet


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


def _write_parquet(file: BinaryIO, columns: Sequence[str], batches: Iterable[list[Row]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    iterator = iter(batches)
    if tuple(columns[: len(POSITION)]) == POSITION:
        kinds = {column: pa.string() if column in _TEXTS else pa.float64() for column in columns}
        kinds |= dict.fromkeys(_INTEGERS, pa.int64())
        rest: Iterator[list[Row]] = iterator
    else:
        rows = [row for batch in iterator for row in batch]
        kinds = {column: _arrow_type([row.get(column) for row in rows]) for column in columns}
        rest = iter([rows])
    schema = pa.schema([(encodable(column), kind) for column, kind in kinds.items()])
    with pq.ParquetWriter(file, schema) as writer:
        for rows in rest:
            arrays = [
                pa.array([_converted(row.get(column), kind) for row in rows], kind) for column, kind in kinds.items()
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _arrow_type(values: Sequence[Any]) -> Any:
    """Return the type of a column: bool, int64 or float64 if all values have it, otherwise string."""
    import pyarrow as pa

    known = [value for value in values if value is not None]
    if known and all(isinstance(value, bool) for value in known):
        return pa.bool_()
    if not known or not all(map(is_number, known)):
        return pa.string()
    if not all(-_INT64_END < value < _INT64_END or isinstance(value, float) for value in known):
        return pa.string()
    return pa.int64() if all(isinstance(value, int) for value in known) else pa.float64()


def _converted(value: Any, kind: Any) -> Any:
    import pyarrow as pa

    if value is None or kind != pa.string():
        return float(value) if value is not None and kind == pa.float64() else value
    plain = _plain(value)
    return encodable(plain) if isinstance(plain, str) else json.dumps(plain)
