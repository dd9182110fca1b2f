"""Judges the measurements: ranks that failed, and values far below the median or below the hardware's nominal speed."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from ddptrain.driver.cluster_check.findings import Finding, Level, Limits, below_median
from ddptrain.driver.cluster_check.network_hints import link_of, network_hint
from ddptrain.driver.cluster_check.readings import HostReading, PairReading, Readings

_GEMM_GPU = Limits(bad=0.8, warning=0.9)
_GEMM_CPU = Limits(bad=0.3, warning=0.5)
_COPY = Limits(bad=0.5, warning=0.8)
_LOCAL_GPU = Limits(bad=0.5, warning=0.7)
_LOCAL_CPU = Limits(bad=0.2, warning=0.4)  # the ranks share the cores with the threads of gloo
_PAIR = Limits(bad=0.5, warning=0.7)
_LATENCY_FACTOR, _LATENCY_US = 5.0, 2_000.0  # a latency is high above this multiple of the median and this value
_EXPECTED = Limits(bad=0.02, warning=0.1)  # of the speed of the slower interface
_MAX_EXPECTED_GBIT = 10.0  # one TCP connection of gloo does not use more of a faster interface
_MAX_WAITED = 0.8  # a longer time without a core is not accepted as an explanation
_BUSY_HINT = "check again when nothing else runs there"
_MIN_GBIT = 0.1  # less is bad on every network
_WORDS = {
    "start": "the start",
    "gemm": "the matrix products",
    "copy": "the copies to the GPU",
    "local": "the all-reduce inside this host",
    "all": "the all-reduce of all ranks",
}


def judge_speed(readings: Readings) -> list[Finding]:
    """Return the findings about measurements."""
    hosts = readings.hosts
    on_gpus = any(rank.device for host in hosts for rank in host.ranks)
    findings = [finding for host in hosts for finding in _failures(host)]
    findings += _of_ranks(hosts) if on_gpus else _excused("gemm", _of_ranks(hosts), hosts)
    inside = below_median(
        {host.host: value for host in hosts if (value := host.best("local", "gb_s")) is not None},
        "all-reduce inside",
        "GB/s",
        _LOCAL_GPU if on_gpus else _LOCAL_CPU,
        hint=f"{'compare `nvidia-smi topo -m` of the hosts; ' if on_gpus else ''}look for other processes on this host",
    )
    findings += inside if on_gpus else _excused("local", inside, hosts)
    findings += _network(readings)
    if readings.everyone_error:
        findings.append(
            Finding(Level.BAD, "", "all ranks", f"the all-reduce of all ranks failed: {readings.everyone_error}")
        )
    return findings


def _excused(stage: str, findings: Iterable[Finding], hosts: Sequence[HostReading]) -> Iterable[Finding]:
    """Yield the findings; a slow measurement becomes a warning if the time without a core explains it.

    The hardware may then be fine. A rank with a slow network sleeps, and hardly waits for a core.
    """
    by_name = {host.host: host for host in hosts}
    nodes = {host.host: node for node, host in enumerate(hosts)}
    for finding in findings:
        waits = {finding.host: by_name[finding.host].waited(stage, nodes.get(finding.other))}
        if finding.other:
            waits[finding.other] = by_name[finding.other].waited(stage, nodes[finding.host])
        worked = 1.0 - min(sum(waits.values()), _MAX_WAITED)
        if finding.level is Level.BAD and finding.of_limit / worked >= 1.0:
            listed = " and ".join(
                f"{100 * wait:.0f} % of the time on {by_name[name].name}" for name, wait in waits.items()
            )
            text = f"{finding.text}; other processes had the cores {listed}"
            yield dataclasses.replace(finding, level=Level.WARNING, text=text, hint=_BUSY_HINT)
        else:
            yield finding


def _failures(host: HostReading) -> Iterable[Finding]:
    """Yield the failures in the ranks of a host, except failed pairs and the all-reduce of all ranks."""
    devices: dict[tuple[str, str], list[str]] = {}  # (stage, reason) -> where
    for rank in host.ranks:
        device = f"GPU {rank.device}" if rank.device else f"rank {rank.rank}"
        failures = rank.failures()
        for line in failures:
            if line.stage not in ("pair", "all"):
                devices.setdefault((line.stage, line.text or rank.error), []).append(device)
        if rank.error and not failures:
            devices.setdefault(("rank", rank.error), []).append(device)
    for (stage, reason), where in devices.items():
        what = _WORDS.get(stage, "the measurement")
        hint = network_hint(host) if stage == "local" else ""
        yield Finding(Level.BAD, host.host, stage, f"{what} failed on {', '.join(where)}: {reason}", hint)


def _of_ranks(hosts: Sequence[HostReading]) -> Iterable[Finding]:
    """Yield the ranks whose matrix products or copies are slow compared with the median of all ranks."""
    names = {f"{host.host}/{rank.rank}": (host, rank) for host in hosts for rank in host.ranks}
    on_gpu = any(rank.device for _, rank in names.values())
    hint = "look for other processes on this host (top, nvidia-smi)"
    for stage, value, unit, limits in (
        ("gemm", "gflops", "GFLOP/s", _GEMM_GPU if on_gpu else _GEMM_CPU),
        ("copy", "gb_s", "GB/s", _COPY),
    ):
        values = {name: number for name, (_, rank) in names.items() if (number := rank.value(stage, value)) is not None}
        for finding in below_median(values, stage, unit, limits, hint=hint):
            host, rank = names[finding.host]
            device = f"GPU {rank.device}" if rank.device else f"rank {rank.rank}"
            reason = next((line.text for line in rank.lines if line.stage == stage and line.status == "done"), "")
            text = f"{device}: {finding.text}" + (f"; its clocks are reduced: {reason}" if reason else "")
            yield dataclasses.replace(finding, host=host.host, text=text)
    for host, rank in names.values():
        for line in rank.lines:
            if line.stage == "gemm" and line.status == "done" and line.text:
                text = f"GPU {rank.device} reduces its clocks under load: {line.text}"
                yield Finding(Level.BAD, host.host, "throttling", text, "check cooling and power supply")


def _network(readings: Readings) -> list[Finding]:
    by_name = {host.host: host for host in readings.hosts}
    findings: list[Finding] = []
    unreachable = _unreachable(readings.pairs, by_name)
    for host, others in unreachable.items():
        over = link_of(by_name[host])
        text = f"no all-reduce with {_names(others, host)} over {over} ({others[0].error})"
        findings.append(Finding(Level.BAD, host, "network", text, network_hint(by_name[host])))
    findings += [
        _of_pair(Level.BAD, pair, f"no all-reduce ({pair.error})", by_name)
        for pair in readings.pairs
        if pair.error and not {pair.first, pair.second} & unreachable.keys()
    ]
    own = _own_speed(readings.pairs)
    slow = []
    for finding in below_median(own, "network", "GB/s", _PAIR):
        slow_host = by_name[finding.host]
        text = f"all-reduce with other hosts over {link_of(slow_host)}: {finding.text}"
        slow.append(dataclasses.replace(finding, text=text, hint=network_hint(slow_host)))
    findings += _excused("pair", slow, readings.hosts)
    named = {finding.host for finding in slow} | unreachable.keys()
    rest = [pair for pair in readings.pairs if not {pair.first, pair.second} & named]
    findings += _excused("pair", _slow_pairs(rest, by_name), readings.hosts)
    return findings


def _names(pairs: Sequence[PairReading], host: str) -> str:
    return ", ".join(pair.second if pair.first == host else pair.first for pair in pairs)


def _unreachable(pairs: Sequence[PairReading], hosts: dict[str, HostReading]) -> dict[str, list[PairReading]]:
    """Return the hosts of which all pairs failed, with the pairs; {} if the pairs of all hosts failed."""
    if all(pair.error for pair in pairs):
        return {}
    of_host = {host: [pair for pair in pairs if host in (pair.first, pair.second)] for host in hosts}
    return {host: own for host, own in of_host.items() if own and all(pair.error for pair in own)}


def _own_speed(pairs: Sequence[PairReading]) -> dict[str, float]:
    """Return the typical speed of each host: the (high) median of its pairs.

    So a slow host does not reduce the speed of the hosts that were measured with it.
    """
    values: dict[str, list[float]] = {}
    for pair in pairs:
        if pair.gb_s is not None:
            for host in (pair.first, pair.second):
                values.setdefault(host, []).append(pair.gb_s)
    return {host: statistics.median_high(each) for host, each in values.items()}


def _slow_pairs(pairs: Sequence[PairReading], hosts: dict[str, HostReading]) -> Iterable[Finding]:
    """Yield slow pairs of hosts that are not slow in general: compared with the median, and with their interfaces."""
    speeds = [pair.gb_s for pair in pairs if pair.gb_s is not None]
    latencies = [pair.latency_us for pair in pairs if pair.latency_us is not None]
    for pair in pairs:
        if pair.gb_s is None or pair.latency_us is None:
            continue
        median = statistics.median(speeds)
        if len(speeds) > 2 and pair.gb_s < _PAIR.bad * median:
            part = 100 * pair.gb_s / median
            text = f"all-reduce: {pair.gb_s:.3g} GB/s, {part:.0f} % of the median ({median:.3g})"
            yield _of_pair(Level.BAD, pair, text, hosts, pair.gb_s / (_PAIR.bad * median))
            continue
        yield from _against_interface(pair, hosts)
        usual = statistics.median(latencies)
        if len(latencies) > 2 and pair.latency_us > max(_LATENCY_FACTOR * usual, _LATENCY_US):
            text = f"all-reduce of 8 bytes takes {pair.latency_us / 1e3:.3g} ms, the median is {usual / 1e3:.3g} ms"
            yield _of_pair(Level.WARNING, pair, text, hosts)


def _against_interface(pair: PairReading, hosts: dict[str, HostReading]) -> Iterable[Finding]:
    gbit_s = 8.0 * (pair.gb_s or 0.0)
    links = [hosts[pair.first].speed_gbit, hosts[pair.second].speed_gbit]
    promised = min((speed for speed in links if speed), default=0.0)
    expected = min(promised, _MAX_EXPECTED_GBIT)
    slowest = max(_EXPECTED.bad * expected, _MIN_GBIT)
    level = Level.BAD if gbit_s < slowest else Level.WARNING
    if level is Level.BAD or gbit_s < _EXPECTED.warning * expected:
        than = f"; the interfaces promise {promised:g} Gbit/s" if promised else ""
        yield _of_pair(
            level, pair, f"all-reduce: {pair.gb_s:.3g} GB/s ({gbit_s:.3g} Gbit/s){than}", hosts, gbit_s / slowest
        )


def _of_pair(
    level: Level, pair: PairReading, text: str, hosts: dict[str, HostReading], of_limit: float = 0.0
) -> Finding:
    first, second = hosts[pair.first], hosts[pair.second]
    words = f"between {first.name} ({link_of(first)}) and {second.name} ({link_of(second)}): {text}"
    hint = network_hint(second) or network_hint(first)
    return Finding(level, pair.first, "network", words, hint, other=pair.second, of_limit=of_limit)
