"""Writes and reads system.jsonl, one line for each host and rank per sample, and shows the use of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from ddptrain.protocol.news import HOST_METRICS, RANK_METRICS, SystemSample, throttle_reasons
from ddptrain.results.metrics import AllSeries, LineReader, MetricLine, finite_number, json_object, series_of
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
    return [line for raw in LineReader(path, _READ_BYTES).lines() if (line := parse_line(raw)) is not None]


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


_MOST_RANKS = 64


def _text(value: float) -> str:
    """Three digits, and at most two of them after the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def use_lines(lines: Sequence[SystemLine]) -> list[tuple[str, str]]:
    """One line for each host and each rank (64 at most): means of rates, and the largest memory and temperature."""
    by_host: dict[str, list[Mapping[str, float]]] = {}
    by_rank: dict[int, list[Mapping[str, float]]] = {}
    for line in lines:
        if line.rank is None:
            by_host.setdefault(line.host, []).append(line.values)
        else:
            by_rank.setdefault(line.rank, []).append(line.values)
    found = [(host, ", ".join(_facts(own, _OF_HOST))) for host, own in sorted(by_host.items())]
    for rank, own in sorted(by_rank.items())[:_MOST_RANKS]:
        reasons = {text for values in own for text in throttle_reasons(values.get("gpu_throttle", 0.0))}
        reduced = [f"clock was reduced: {', '.join(sorted(reasons))}"] if reasons else []
        found.append((f"rank {rank}", ", ".join([*_facts(own, _OF_RANK), *reduced])))
    return found


# Text around the value, metric, unit, its scale, and whether the largest value counts instead of the mean.
_OF_HOST = (
    ("CPU {}", "cpu_percent", "%", 1.0, False),
    ("memory {}", "memory_bytes", "GB", 1e9, True),
    ("disk {}", "disk_bytes_s", "MB/s", 1e6, False),
    ("network {}", "network_bytes_s", "MB/s", 1e6, False),
)
_OF_RANK = (
    ("CPU {} of a core", "cpu_percent", "%", 1.0, False),
    ("resident memory {}", "rss_bytes", "GB", 1e9, True),
    ("GPU {}", "gpu_percent", "%", 1.0, False),
    ("GPU memory {}", "gpu_memory_bytes", "GB", 1e9, True),
    ("{}", "gpu_power_w", "W", 1.0, False),
    ("{}", "gpu_temperature_c", "°C", 1.0, True),
)


def _facts(lines: Sequence[Mapping[str, float]], metrics: Sequence[tuple[str, str, str, float, bool]]) -> Iterator[str]:
    for text, name, unit, scale, is_largest in metrics:
        values = [values[name] for values in lines if name in values]
        if values and is_largest:
            totals = [values[of] for values in lines if (of := name.replace("_bytes", "_total_bytes")) in values]
            total = f" of {_text(totals[-1] / scale)}" if totals and scale == 1e9 else ""
            yield text.format(f"up to {_text(max(values) / scale)}{total} {unit}")
        elif values:
            yield text.format(f"{_text(fmean(values) / scale)} {unit}")


class SystemSummary:
    """The use of all hosts and GPUs of a run in a few words; it keeps the newest sample of each host and rank."""

    def __init__(self) -> None:
        self._hosts: dict[str, Mapping[str, float]] = {}
        self._ranks: dict[str, Mapping[str, float]] = {}

    def add(self, sample: SystemSample) -> None:
        """Take a sample in."""
        if sample.use:
            self._hosts[sample.host] = sample.use
        self._ranks |= sample.ranks

    def facts(self) -> list[str]:
        """As "GPU 93 % 61/80 GB 71 °C", "CPU 45 %", "memory 12/64 GB": means of use, and the fullest and hottest."""
        parts = []
        gpus = [use for use in self._ranks.values() if "gpu_memory_bytes" in use]
        if gpus:
            percent = [use["gpu_percent"] for use in gpus if "gpu_percent" in use]
            heat = [use["gpu_temperature_c"] for use in gpus if "gpu_temperature_c" in use]
            words = ["GPU"] + ([f"{sum(percent) / len(percent):.0f} %"] if percent else [])
            words += [_fullest(gpus, "gpu_memory")] + ([f"{max(heat):.0f} °C"] if heat else [])
            parts.append(" ".join(filter(None, words)))
        hosts = [*self._hosts.values()]
        if busy := [use["cpu_percent"] for use in hosts if "cpu_percent" in use]:
            parts.append(f"CPU {sum(busy) / len(busy):.0f} %")
        if memory := _fullest(hosts, "memory"):
            parts.append(f"memory {memory}")
        return parts


def _fullest(uses: list[Mapping[str, float]], name: str) -> str:
    """Used and total gigabytes of the fullest one; "" if none is known."""
    known = [(use[f"{name}_bytes"], use[f"{name}_total_bytes"]) for use in uses if use.get(f"{name}_total_bytes")]
    if not known:
        return ""
    used, total = max(known, key=lambda pair: pair[0] / pair[1])
    return f"{_gigabytes(used)}/{_gigabytes(total)} GB"


def _gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.0f}" if size_bytes >= 10e9 else f"{size_bytes / 1e9:.1f}"
