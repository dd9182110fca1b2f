"""Writes the metrics of runs for other tools: tables in CSV files, and the event files of TensorBoard."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ddptrain.errors import UsageError
from ddptrain.file_ops import atomic_file
from ddptrain.optional_packages import require
from ddptrain.results.compare import flat
from ddptrain.results.metrics import AllSeries, MetricsReader, drop_replaced, read_series
from ddptrain.results.recorded_config import params_of
from ddptrain.results.run import Run, parse_time
from ddptrain.results.selection import FIELDS, PARAMS, RunFields
from ddptrain.results.show.curves import mean_of

Row = Mapping[str, Any]
Point = tuple[float, int, float]  # time, step, value
_POSITION = ("run", "name", "rank", "attempt", "time_s", "step", "epoch")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet executes a cell that begins with one of these
_EVENTS = "events.out.tfevents.0000000000.ddptrain"  # always the same: a second export replaces the first one
_LARGEST_STEP = 1 << 62
_LARGEST_FLOAT32 = 3.4028235e38


@contextmanager
def _output_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` when the block ends; missing folders are created. Raises UsageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path, durable=False) as file:
            yield file
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another place with -o") from error


def _encodable(text: str) -> str:
    """Return the text with escapes for lone surrogates, which UTF-8 cannot encode but JSON may contain."""
    return text.encode("utf-8", "backslashreplace").decode()


# --- CSV ---


def export_tables(views: Sequence[Run], output: Path) -> list[Path]:
    """Write the tables as CSV files; return their paths.

    If `output` ends in .csv, it is a file, which gets the table of metrics only; otherwise it is a folder, which gets
    both tables.

    Raises UsageError, ResultsError.
    """
    is_file = output.suffix.lower() == ".csv"
    paths = [output if is_file else output / "metrics.csv"]
    names = sorted(
        {name for view in views for line in MetricsReader(view.metrics_jsonl).read() for name in line.values}
    )
    titles = {name: f"metrics.{name}" if name in _POSITION else name for name in names}
    with _output_file(paths[0]) as file:
        _write_csv(file, [*_POSITION, *titles.values()], (_metric_rows(view, titles) for view in views))
    if not is_file:
        paths.append(output / "runs.csv")
        rows = [_run_row(view) for view in views]
        with _output_file(paths[1]) as file:
            _write_csv(file, list(dict.fromkeys(name for row in rows for name in row)), [rows])
    return paths


def _metric_rows(view: Run, titles: Mapping[str, str]) -> list[Row]:
    """Return a row for each ctx.log call of a run, without values that a later attempt has replaced."""
    lines = drop_replaced(MetricsReader(view.metrics_jsonl).read())
    return [
        {
            "run": view.run_id,
            "name": view.record.name,
            "rank": line.rank,
            "attempt": line.attempt,
            "time_s": line.time_s,
            "step": line.step,
            "epoch": line.epoch,
            # A name that is not in `titles` was logged after the titles were read.
            **{titles[name]: value for name, value in line.values.items() if name in titles},
        }
        for line in lines
    ]


def _run_row(view: Run) -> Row:
    """Return one row for a run: its fields, parameters, and the last and best value of each metric."""
    field_value = RunFields(view)
    row = {name: field_value(name) for name in FIELDS if name != "age"}
    row["tags"] = " ".join(row["tags"])
    row |= {PARAMS + name: value for name, value in flat(params_of(view))}
    for name, value in sorted(view.record.last_metrics.items()):
        row[f"last({name})"] = value
        if (best := field_value(f"best({name})")) is not None:
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
    plain = value if value is None or isinstance(value, str | int | float) else json.dumps(value, default=str)
    return f"'{plain}" if isinstance(plain, str) and plain.startswith(_FORMULA) else plain


# --- TensorBoard ---


def _points(series: AllSeries, metric: str) -> list[Point]:
    """Return the values of a metric, mean over the ranks, in the order of steps.

    A value without a step gets its epoch, or else the number of the ctx.log call, as its step. NaN values, and steps
    that the formats cannot hold, are left out.
    """
    by_step: dict[int, list[tuple[float, float]]] = {}
    for (name, _), rank_series in series.items():
        if name != metric:
            continue
        for call, (time_s, step, epoch, value) in enumerate(
            zip(rank_series.time_s, rank_series.step, rank_series.epoch, rank_series.value, strict=True)
        ):
            place = step if step is not None else epoch if epoch is not None else call
            if value == value and abs(place) < _LARGEST_STEP:
                by_step.setdefault(int(place), []).append((time_s, value))
    return [
        (max(time_s for time_s, _ in rows), step, mean_of([value for _, value in rows]))
        for step, rows in sorted(by_step.items())
    ]


def export_tensorboard(views: Sequence[Run], output: Path) -> list[Path]:
    """Write <output>/<run>/events... for each run: metrics (mean over the ranks), and parameters as text.

    Returns the paths of the files.

    Raises UsageError, ResultsError.
    """
    require("tensorboard", "tensorboard", "choose --format csv")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    from ddptrain.tracking.tensorboard import FILE_VERSION, text_value

    paths = []
    for view in views:
        series = read_series(view.metrics_jsonl)
        began = parse_time(view.record.started_at)
        began_s = began.timestamp() if began is not None else 0.0
        rows = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in flat(params_of(view))]
        table = "\n".join(["| parameter | value |", "| --- | --- |", *rows])
        paths.append(output / view.run_id / _EVENTS)
        with _output_file(paths[-1]) as file:
            writer = RecordWriter(file)
            events = [Event(wall_time=began_s, file_version=FILE_VERSION)]
            events.append(Event(wall_time=began_s, summary=Summary(value=[text_value("params", table)])))
            for metric in sorted({name for name, _ in series}):
                for time_s, step, value in _points(series, metric):
                    # The format has float32: protobuf refuses a larger number.
                    stored = value if abs(value) <= _LARGEST_FLOAT32 else float("inf") if value > 0 else float("-inf")
                    summary = Summary(value=[Summary.Value(tag=_encodable(metric), simple_value=stored)])
                    events.append(Event(wall_time=time_s, step=step, summary=summary))
            for event in events:
                writer.write(event.SerializeToString())
            writer.flush()
    return paths
