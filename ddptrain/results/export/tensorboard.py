"""Exports the metrics of runs as TensorBoard event files, one folder for each run."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ddptrain.errors import UsageError
from ddptrain.optional_packages import install_command
from ddptrain.results.compare import flat
from ddptrain.results.export.output import encodable, output_file
from ddptrain.results.lookup import RunView, parse_time
from ddptrain.results.metrics import AllSeries, read_series
from ddptrain.results.recorded_config import params_of
from ddptrain.results.show.curves import mean_of
from ddptrain.results.system.system_file import HOST_PREFIX, read_system, system_series

_FILE = "events.out.tfevents.0000000000.ddptrain"  # always the same: a second export replaces the first one
_LARGEST_STEP = 1 << 62
Point = tuple[float, int, float]  # time, step, value


def export_tensorboard(views: Sequence[RunView], output: Path) -> list[Path]:
    """Write <output>/<run>/events... for each run: metrics (mean over the ranks), system metrics, parameters as text.

    Returns the paths of the files.

    Raises UsageError, ResultsError.
    """
    try:
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError:
        raise UsageError(f"this needs tensorboard: {install_command('tensorboard')}, or choose --format csv") from None
    paths = []
    for view in views:
        series = read_series(view.layout.metrics_jsonl, view.record.attempts)
        system = system_series(read_system(view.layout.system_jsonl))
        paths.append(output / view.run_id / _FILE)
        with output_file(paths[-1]) as file:
            writer = RecordWriter(file)
            for event in _events(view, series, system):
                writer.write(event.SerializeToString())
            writer.flush()
    return paths


def points(series: AllSeries, metric: str) -> list[Point]:
    """Return the values of a metric, mean over the ranks, in the order of steps.

    A value without a step gets its epoch, or else the number of the ctx.log call, as its step. NaN values, and steps
    that the format cannot hold, are left out.
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


def _events(view: RunView, series: AllSeries, system: AllSeries) -> Iterator[Any]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    from ddptrain.tracking.tensorboard import FILE_VERSION, text_value

    began = parse_time(view.record.started_at)
    began_s = began.timestamp() if began is not None else 0.0
    yield Event(wall_time=began_s, file_version=FILE_VERSION)
    yield Event(wall_time=began_s, summary=Summary(value=[text_value("params", _as_table(params_of(view)))]))
    metrics = sorted({name for name, _ in series})
    every = ((encodable(metric), point) for metric in metrics for point in points(series, metric))
    for tag, (time_s, step, value) in chain(every, _system_points(system, began_s or None)):
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=_as_float32(value))])
        yield Event(wall_time=time_s, step=step, summary=summary)


def _system_points(series: AllSeries, began_s: float | None) -> Iterator[tuple[str, Point]]:
    """Yield the system metrics of ranks and hosts, as "system/gpu_percent/rank_0"; a step is a second of the run."""
    for (name, number), series_of_metric in sorted(series.items()):
        start = series_of_metric.time_s[0] if began_s is None else began_s
        tag = f"{name}/{'host' if name.startswith(HOST_PREFIX) else 'rank'}_{number}"
        for time_s, value in zip(series_of_metric.time_s, series_of_metric.value, strict=True):
            if abs(time_s - start) < _LARGEST_STEP:
                yield tag, (time_s, max(0, int(time_s - start)), value)


def _as_float32(value: float) -> float:
    """Return the value, or an infinity if it is too large for a float32."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return value


def _as_table(params: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in flat(params)]
    return "\n".join(["| parameter | value |", "| --- | --- |", *rows])
