"""Writes and reads system.jsonl: one line for each host and each rank per sample."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddptrain.file_ops import open_regular
from ddptrain.protocol.system_metrics import HOST_METRICS, RANK_METRICS
from ddptrain.protocol.worker_notices import SystemSample
from ddptrain.results.errors import results_errors
from ddptrain.results.metrics import AllSeries, MetricLine, finite_number, json_object, series_of
from ddptrain.results.secure_files import JsonLines

PREFIX = "system/"
HOST_PREFIX = "system/host/"
_HALVED_EVERY_BYTES = 16 << 20  # each time the file has grown by so much, half as many samples are kept
_READ_BYTES = 64 << 20  # the end of a larger file
_HOST_CHARACTERS = 255
_LARGEST = 1e300


class SystemFile:
    """Appends samples; the file is created with the first one.

    Several workers of one host measure the same host: the line of the worker with the lowest rank is written. So that
    the file does not fill the disk, from 16 MiB on every second sample is written, from 32 MiB on every fourth, and so
    on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: JsonLines | None = None
        self._counts: dict[tuple[str, int], int] = {}  # samples so far, by host and lowest rank

    def append(self, sample: SystemSample, attempt: int) -> None:
        """Append the lines of a sample. Raises ResultsError."""
        if self._lines is None:
            self._lines = JsonLines(self._path)
        source = sample.host, sample.rank
        count = self._counts[source] = self._counts.get(source, -1) + 1
        if count % (1 << (self._lines.size_bytes // _HALVED_EVERY_BYTES)):
            return
        head: dict[str, object] = {"time_s": round(sample.time_ns / 1e9, 3), "attempt": attempt, "host": sample.host}
        if sample.rank == min(rank for host, rank in self._counts if host == sample.host):
            self._lines.append({**head, "rank": None, **sample.use})
        for rank, use in sample.ranks.items():
            self._lines.append({**head, "rank": int(rank), **use})

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._lines is not None:
            self._lines.close()


@dataclass(frozen=True, slots=True)
class SystemLine:
    """The use of a host (rank None) or of a rank at a time in seconds since the epoch."""

    time_s: float
    host: str
    rank: int | None
    values: Mapping[str, float]


def read_system(path: Path) -> list[SystemLine]:
    """Return the lines of the file, of a file above 64 MiB those at its end; none if there is no file.

    Incomplete and damaged lines, and unknown names, are left out. Raises ResultsError if the file can't be read.
    """
    with results_errors(path, "read"):
        try:
            descriptor = open_regular(path)
        except FileNotFoundError:
            return []
        with os.fdopen(descriptor, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _READ_BYTES))
            data = file.read(_READ_BYTES)
    return [line for raw in data.split(b"\n") if (line := parse_line(raw)) is not None]


def parse_line(raw: bytes) -> SystemLine | None:
    """Return what a line says; None for a damaged one."""
    fields = json_object(raw)
    time_s, host, rank = _number(fields.get("time_s")), fields.get("host"), fields.get("rank")
    if time_s is None or not isinstance(host, str) or (rank is not None and type(rank) is not int):
        return None
    found = {name: _number(fields.get(name)) for name in (HOST_METRICS if rank is None else RANK_METRICS)}
    values = {name: value for name, value in found.items() if value is not None}
    return SystemLine(time_s, host[:_HOST_CHARACTERS], rank, values)


def _number(value: object) -> float | None:
    number = finite_number(value)
    return number if number is not None and abs(number) < _LARGEST else None


def system_series(lines: list[SystemLine]) -> AllSeries:
    """Return the metrics as series: "system/gpu_percent" of each rank, "system/host/cpu_percent" of each host.

    Hosts are numbered in the order of their names.
    """
    numbers = {host: number for number, host in enumerate(sorted({line.host for line in lines}))}
    metrics = []
    for line in lines:
        prefix, where = (HOST_PREFIX, numbers[line.host]) if line.rank is None else (PREFIX, line.rank)
        values: dict[str, float | None] = {prefix + name: value for name, value in line.values.items()}
        metrics.append(MetricLine(line.time_s, None, None, where, values))
    return series_of(metrics)
