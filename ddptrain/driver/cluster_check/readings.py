"""The facts and measurements of a check, by host; they are judged elsewhere."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddptrain.protocol.cluster_check import WAITED, HostFacts, Interface, ProbeLine


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far the clock of a host is ahead of the driver's, and the uncertainty of this value, in seconds."""

    offset_s: float
    uncertainty_s: float


@dataclass(frozen=True, slots=True)
class RankReading:
    """The measurements of one rank. device: the GPU, or "" for CPU cores. error: why the rank failed, or ""."""

    rank: int
    lines: tuple[ProbeLine, ...]
    device: str = ""
    error: str = ""

    def value(self, stage: str, name: str) -> float | None:
        """Return a measured number; None if it was not measured."""
        for line in self.lines:
            if (line.stage, line.status) == (stage, "done"):
                return line.values.get(name)
        return None

    def failures(self) -> Sequence[ProbeLine]:
        """Return the stages that failed; if the rank failed, also the stage that did not end."""
        over = {(line.stage, line.peer) for line in self.lines if line.status in ("done", "failed", "skipped")}
        open_ones = [line for line in self.lines if line.status == "begun" and (line.stage, line.peer) not in over]
        return [*(line for line in self.lines if line.status == "failed"), *(open_ones if self.error else [])]


def better_of(first: RankReading, second: RankReading) -> RankReading:
    """Both measurements of a rank, with the better value of each; what failed in one of them has failed."""
    again = {(line.stage, line.peer): line for line in second.lines if line.status == "done"}
    lines = [
        dataclasses.replace(line, values=_better(line.values, again[key].values))
        if line.status == "done" and (key := (line.stage, line.peer)) in again
        else line
        for line in first.lines
    ]
    lines += [line for line in second.lines if line.status == "failed"]
    return dataclasses.replace(first, lines=tuple(lines), error=first.error or second.error)


def _better(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Return the larger values, but the smaller latency, and the wait for a core that belongs to the larger values."""
    better = {name: max(value, second.get(name, value)) for name, value in first.items()}
    if "latency_us" in first:
        better["latency_us"] = min(first["latency_us"], second.get("latency_us", first["latency_us"]))
    if WAITED in first:
        is_second = any(second.get(name, 0.0) > first.get(name, 0.0) for name in ("gb_s", "gflops"))
        better[WAITED] = (second if is_second else first).get(WAITED, 0.0)
    return better


@dataclass(frozen=True, slots=True)
class HostReading:
    """The readings of a host. error: why there are no facts. busy: the runs that hold all of its slots."""

    host: str
    workers: tuple[str, ...]
    facts: HostFacts | None = None
    clock: ClockOffset | None = None
    ranks: tuple[RankReading, ...] = ()
    error: str = ""
    busy: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The host's name for messages, with its address in the cluster if this differs."""
        if self.facts is None or self.host in (self.facts.hostname, "127.0.0.1", "::1"):
            return self.facts.hostname if self.facts is not None else self.host
        return f"{self.facts.hostname} ({self.host})"

    @property
    def speed_gbit(self) -> float:
        """The speed of the interface with the worker's address in Gbit/s; 0 if it is not known."""
        link = self.interface
        return link.speed_mbit / 1e3 if link is not None else 0.0

    @property
    def interface(self) -> Interface | None:
        """The interface that gloo uses: GLOO_SOCKET_IFNAME, else the one with the worker's address."""
        if self.facts is None:
            return None
        name = self.facts.network_env.get("GLOO_SOCKET_IFNAME", self.facts.interface)
        return next((each for each in self.facts.interfaces if each.name == name), None)

    def waited(self, stage: str, peer: int | None = None) -> float:
        """Return the median fraction of the time of a stage in which a rank waited for a core.

        peer: the node rank of the other host, for measurements of one pair; None: all.
        """
        lines = [
            line
            for rank in self.ranks
            for line in rank.lines
            if (line.stage, line.status) == (stage, "done") and peer in (None, line.peer)
        ]
        return statistics.median(line.values.get(WAITED, 0.0) for line in lines) if lines else 0.0

    def best(self, stage: str, name: str) -> float | None:
        """Return the largest value of the host's ranks; None if there is no value."""
        return max(self.values(stage, name), default=None)

    def values(self, stage: str, name: str) -> list[float]:
        """Return the values of the host's ranks, without ranks that have none."""
        return [value for rank in self.ranks if (value := rank.value(stage, name)) is not None]


@dataclass(frozen=True, slots=True)
class PairReading:
    """The all-reduce between two hosts. error: why there are no values."""

    first: str
    second: str
    gb_s: float | None = None
    latency_us: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Readings:
    """Everything that a check has read. everyone: the all-reduce of all ranks, `gb_s` and `latency_us`."""

    hosts: tuple[HostReading, ...]
    pairs: tuple[PairReading, ...] = ()
    everyone: Mapping[str, float] | None = None
    everyone_error: str = ""


def pairs_of(hosts: Sequence[HostReading]) -> tuple[PairReading, ...]:
    """Return the pairs, as the first rank of each host measured them; `hosts` are in the order of their node ranks."""
    pairs: dict[tuple[int, int], PairReading] = {}
    for node, host in enumerate(hosts):
        if not host.ranks:
            continue
        first = host.ranks[0]
        failures = first.failures()
        for line in first.lines:
            if line.stage != "pair" or not 0 <= line.peer < len(hosts) or line.peer == node:
                continue
            key = min(node, line.peer), max(node, line.peer)
            names = hosts[key[0]].host, hosts[key[1]].host
            if line.status == "done":
                pairs[key] = PairReading(*names, line.values.get("gb_s"), line.values.get("latency_us"))
            elif line in failures and key not in pairs:
                pairs[key] = PairReading(*names, error=line.text or "it did not end")
    return tuple(pairs[key] for key in sorted(pairs))
