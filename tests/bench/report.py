"""The table and the raw values of a benchmark."""

from __future__ import annotations

import os
import platform
import textwrap
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from tests.bench.measure import Records, Result, Spread

_HEADINGS = ("row", "ours: median (min..max)", "peer: median (min..max)", "ratio", "goal", "reached")
_WIDTH = 116


def describe_machine() -> dict[str, str | int | float]:
    """The machine and the versions."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "processor": _processor(),
        "load_1min_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("ddptrain", "torch", "distributed")},
    }


def table(results: Sequence[Result]) -> str:
    """The table, one line per row."""
    lines = [_HEADINGS, *map(_cells, results)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def legend(results: Sequence[Result]) -> str:
    """The explanation of each row, and the failures."""
    texts = []
    for result in results:
        row = result.row
        peer = f" Peer: {row.peer_name}." if row.peer_name else ""
        fault = f" FAILED: {result.error}" if result.error else f" Skipped: {result.skipped}." if result.skipped else ""
        texts.append(f"{row.name}: {row.what}.{peer}{fault}")
    return "\n".join(textwrap.fill(text, _WIDTH, subsequent_indent="    ") for text in texts)


def method(machine: Mapping[str, object], runs: int, took_s: float, *, quick: bool) -> str:
    """A short description of the method."""
    text = "Quick: with sizes too small for the figures to mean anything. " if quick else ""
    text += (
        f"Medians of {runs} run{'s' if runs > 1 else ''} of each, in turns (peer, ours, peer, ...), each in processes "
        "of its own and after one run that does not count where starting is measured; in brackets the least and the "
        "most. Ratios are ours by the peer's, of the medians. Both sides run without the user's settings for malloc, "
        f"OpenMP and torch. It took {took_s / 60:.1f} minutes on "
    )
    return textwrap.fill(text + ", ".join(f"{name} {value}" for name, value in machine.items()) + ".", _WIDTH)


def raw(
    machine: Mapping[str, object], runs: int, took_s: float, results: Sequence[Result], records: Sequence[Records]
) -> dict[str, Any]:
    """All results as JSON data."""
    variants = {name: figures for record in records for name, figures in record.values.items()}
    return {
        "machine": dict(machine),
        "runs": runs,
        "took_s": took_s,
        "rows": [_raw_row(result) for result in results],
        "variants": variants,
    }


def _raw_row(result: Result) -> dict[str, Any]:
    row = result.row
    return {
        "row": row.name,
        "unit": row.unit,
        "ours": list(result.ours.values) if result.ours else None,
        "peer": list(result.peer.values) if result.peer else None,
        "peer_name": row.peer_name or None,
        "ratio": result.ratio,
        "goal": str(row.goal) if row.goal else None,
        "reached": result.reached,
        "error": result.error or None,
        "skipped": result.skipped or None,
    }


def _cells(result: Result) -> tuple[str, ...]:
    row = result.row
    ratio = "-" if result.ratio is None else f"{result.ratio:.3g}"
    reached = (
        "FAILED"
        if result.error
        else "skipped"
        if result.skipped
        else {True: "yes", False: "NO", None: "-"}[result.reached]
    )
    goal = str(row.goal) if row.goal else "-"
    return (row.name, _spread(result.ours, row.unit), _spread(result.peer, row.unit), ratio, goal, reached)


def _spread(spread: Spread | None, unit: str) -> str:
    if spread is None:
        return "-"
    least, most = min(spread.values), max(spread.values)
    return f"{_number(spread.median)} {unit} ({_number(least)}..{_number(most)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _processor() -> str:
    """The model of the CPU, if the kernel reports it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
