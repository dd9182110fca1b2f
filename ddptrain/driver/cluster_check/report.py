"""The text and the JSON of a check."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ddptrain.config.wording import counted
from ddptrain.driver.cluster_check.check import Report
from ddptrain.driver.cluster_check.findings import Finding, Level
from ddptrain.driver.cluster_check.readings import HostReading, PairReading
from ddptrain.text_tables import clean_line, number, plain_table

HEADER = ("HOST", "RESULT", "DEVICES", "GFLOP/s", "TO GPU", "IN HOST", "TO HOSTS", "LATENCY", "DISK", "CLOCK")
PAIR_HEADER = ("HOST", "OTHER HOST", "GB/s", "ms")


def lines(report: Report, *, all_pairs: bool) -> list[str]:
    """Return the whole report as text: the table, the findings, the pairs if wanted, and the result."""
    names = host_names(report)
    rows = [tuple(clean_line(cell) for cell in _row(report, host)) for host in report.readings.hosts]
    text = [plain_table([HEADER, *rows])]
    if all_pairs and report.readings.pairs:
        text += ["", plain_table([PAIR_HEADER, *pair_rows(report.readings.pairs, names)])]
    if report.findings:
        text += ["", *(clean_line(f"{each.level}: {finding_line(each, names)}") for each in report.findings)]
    return [*text, "", *(clean_line(each) for each in summary(report))]


def _row(report: Report, host: HostReading) -> tuple[str, ...]:
    """Return the cells of a host for HEADER: bandwidths in GB/s, latency in ms, disk in MB/s, clock in s."""
    facts, clock = host.facts, host.clock
    own = [pair for pair in report.readings.pairs if host.host in (pair.first, pair.second)]
    latency_us = _middle([pair.latency_us for pair in own])
    return (
        host.name,
        result(report, host),
        _devices(host),
        number(_middle(host.values("gemm", "gflops"))),
        number(_middle(host.values("copy", "gb_s"))),
        number(host.best("local", "gb_s")),
        number(_middle([pair.gb_s for pair in own])),
        number(latency_us / 1e3 if latency_us is not None else None),
        number(facts.scratch_write_mb_s if facts is not None else None),
        f"{clock.offset_s:+.3f}" if clock is not None else "-",
    )


def result(report: Report, host: HostReading) -> str:
    """Return `ok`, `warning`, `bad`, `left out`, or `busy` for a host that was not checked."""
    if host.busy:
        return "busy"
    if host.host in report.left_out:
        return "left out"
    out = {*report.left_out}  # a bad pair with one of these is not a fault of the other host
    levels = {
        each.level
        for each in report.findings
        if host.host in (each.host, each.other) and not {each.host, each.other} & out
    }
    return next((str(level) for level in Level if level in levels), "ok")


def _devices(host: HostReading) -> str:
    facts = host.facts
    if facts is None:
        return "-"
    return counted(len(facts.gpus), "GPU") if facts.gpus else counted(facts.cores, "core")


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median_high(known) if known else None


def summary(report: Report) -> list[str]:
    """Return the lines below the table: all ranks, hosts that were not checked, and the result."""
    readings = report.readings
    checked = [host for host in readings.hosts if not host.busy]
    lines = []
    left_out = ", ".join(host.name for host in readings.hosts if host.host in report.left_out)
    if readings.everyone is not None:
        lines.append(f"all-reduce of all ranks: {_speed(readings.everyone)}")
    if report.everyone_else is not None:
        lines.append(f"all-reduce of all ranks without {left_out}: {_speed(report.everyone_else)}")
    if report.everyone_else_error:
        lines.append(f"all-reduce of all ranks without {left_out} failed: {report.everyone_else_error}")
    lines += [
        f"{host.name} was not checked: all of its slots are in use by {', '.join(host.busy)}"
        for host in readings.hosts
        if host.busy
    ]
    if left_out:
        lines.append(f"left out: {left_out}")
    lines.append(f"{_hosts_by_result(report, checked)}, {report.depth} check in {report.seconds:.1f} s")
    return lines


def _hosts_by_result(report: Report, checked: Sequence[HostReading]) -> str:
    """For example `5 of 8 hosts ok, 2 with warnings, 1 bad`."""
    if not checked:
        return "no host was checked"
    counts = Counter(result(report, host) for host in checked)
    texts = {"warning": "with warnings", "bad": "bad", "left out": "left out"}
    others = [f"{counts[name]} {text}" for name, text in texts.items() if counts[name]]
    return ", ".join([f"{counts['ok']} of {counted(len(checked), 'host')} ok", *others])


def _speed(values: Any) -> str:
    return f"{number(values.get('gb_s'))} GB/s, 8 bytes in {number(values.get('latency_us', 0.0) / 1e3)} ms"


def finding_line(finding: Finding, names: dict[str, str]) -> str:
    """Return a finding as one line; `names` has the names of hosts by their addresses."""
    where = "" if finding.other or not finding.host else f"{names.get(finding.host, finding.host)}: "
    hint = f" ({finding.hint})" if finding.hint else ""
    return f"{where}{finding.subject}: {finding.text}{hint}"


def host_names(report: Report) -> dict[str, str]:
    """Return the names of the hosts by their addresses."""
    return {host.host: host.name for host in report.readings.hosts}


def as_dict(report: Report) -> dict[str, Any]:
    """Return the report as plain data, for --json."""
    return {
        "check": report.depth,
        "usable": report.usable,
        "seconds": round(report.seconds, 2),
        "left_out": list(report.left_out),
        "findings": [dataclasses.asdict(finding) for finding in report.findings],
        "hosts": [_host(report, host) for host in report.readings.hosts],
        "pairs": [dataclasses.asdict(pair) for pair in report.readings.pairs],
        "all_ranks": _all_ranks(report.readings.everyone, report.readings.everyone_error),
        "all_ranks_without_bad": _all_ranks(report.everyone_else, report.everyone_else_error),
    }


def _all_ranks(values: Any, error: str) -> dict[str, Any] | None:
    if values is None and not error:
        return None
    return {**(values or {}), "error": error}


def _host(report: Report, host: HostReading) -> dict[str, Any]:
    return {
        "host": host.host,
        "name": host.name,
        "result": result(report, host),
        "workers": list(host.workers),
        "busy": list(host.busy),
        "error": host.error,
        "facts": dataclasses.asdict(host.facts) if host.facts is not None else None,
        "clock": dataclasses.asdict(host.clock) if host.clock is not None else None,
        "ranks": [
            {
                "rank": rank.rank,
                "device": rank.device,
                "error": rank.error,
                "gflops": rank.value("gemm", "gflops"),
                "to_gpu_gb_s": rank.value("copy", "gb_s"),
                "in_host_gb_s": rank.value("local", "gb_s"),
                "in_host_latency_us": rank.value("local", "latency_us"),
            }
            for rank in host.ranks
        ],
    }


def pair_rows(pairs: Iterable[PairReading], names: dict[str, str]) -> list[tuple[str, ...]]:
    """Return the pairs of hosts as rows: both names, GB/s, latency in ms."""
    rows = []
    for pair in pairs:
        latency = number(pair.latency_us / 1e3 if pair.latency_us is not None else None)
        cells = (names.get(pair.first, pair.first), names.get(pair.second, pair.second), number(pair.gb_s), latency)
        rows.append(tuple(clean_line(cell) for cell in cells))
    return rows
