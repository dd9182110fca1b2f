"""Checks the hosts of some places: reads facts, measures, and judges the values."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddptrain.driver.cluster_check.facts import Answer, ask_hosts
from ddptrain.driver.cluster_check.findings import Finding, Level
from ddptrain.driver.cluster_check.judge_facts import judge_facts
from ddptrain.driver.cluster_check.judge_speed import judge_speed
from ddptrain.driver.cluster_check.probe_plan import Depth, plan_again
from ddptrain.driver.cluster_check.probes import run_probes
from ddptrain.driver.cluster_check.readings import HostReading, RankReading, Readings, better_of, pairs_of
from ddptrain.driver.worker_group.rank_place import RankPlace
from ddptrain.driver.worker_group.worker_group import WorkerGroup
from ddptrain.log import Log
from ddptrain.protocol.cluster_check import ProbePlan

_log = Log(__name__)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check.

    left_out: bad hosts that are not used. everyone_else: the all-reduce of all ranks without these hosts, if measured.
    """

    depth: str
    readings: Readings
    findings: tuple[Finding, ...]
    seconds: float
    left_out: tuple[str, ...] = ()
    everyone_else: Mapping[str, float] | None = None
    everyone_else_error: str = ""

    @property
    def bad(self) -> tuple[str, ...]:
        """The hosts to leave out so that no bad finding about a host or a pair of hosts remains."""
        return hosts_to_leave_out(self.findings)

    @property
    def usable(self) -> bool:
        """Whether a run can be started: nothing bad was found, except on hosts that are left out."""
        left = [finding for finding in self.findings if finding.level is Level.BAD]
        if self.left_out:
            left = [
                each for each in left if not {each.host, each.other} & {*self.left_out} and each.subject != "all ranks"
            ]
        checked = {host.host for host in self.readings.hosts if host.ranks}
        return not left and not self.everyone_else_error and bool(checked - {*self.left_out})


def hosts_to_leave_out(findings: Sequence[Finding]) -> tuple[str, ...]:
    """Return the hosts with bad findings, and enough members of other bad pairs that none of these pairs is left."""
    bad = [finding for finding in findings if finding.level is Level.BAD and finding.host]
    chosen = list(dict.fromkeys(finding.host for finding in bad if not finding.other))
    pairs = [(finding.host, finding.other) for finding in bad if finding.other]
    while left := [pair for pair in pairs if not {*pair} & {*chosen}]:
        members = [host for pair in left for host in reversed(pair)]  # with equal counts, the second host of the pair
        chosen.append(max(dict.fromkeys(members), key=members.count))
    return tuple(chosen)


@dataclass(frozen=True, slots=True)
class HostCheck:
    """Checks hosts with the ranks of a worker group, which has reserved their slots.

    env: the environment variables of the run. on_gpus: the ranks use their GPUs. check: is called while ranks measure,
    and may raise an exception.
    """

    worker_group: WorkerGroup
    depth: Depth
    env: Mapping[str, str]
    check: Callable[[], None]
    on_gpus: bool

    def run(self, places: Sequence[RankPlace], others: Mapping[str, tuple[str, ...]] = {}) -> Report:
        """Check the hosts of these places. `others`: hosts without a free slot, and the runs that use them.

        Raises ClusterError if the scheduler is lost.
        """
        began = time.monotonic()
        worker_of = {place.slot.host: place.slot.worker for place in reversed(places)}
        answers = ask_hosts(self.worker_group.client, [*worker_of.values()], self.depth.facts_s)
        plan = self._plan(places)
        ranks = self._measured(places, plan) if places else []
        readings = _readings(places, {host: answers[worker] for host, worker in worker_of.items()}, ranks, self.env)
        speed = judge_speed(readings)
        if _may_be_disturbed(speed, ranks):  # for example by another program on a host; use the better of two values
            _log.info("measured again", findings=[each.text for each in speed])
            second = self._measured(places, plan_again(plan, speed, [host.host for host in readings.hosts]))
            ranks = [better_of(*both) for both in zip(ranks, second, strict=True)]
            readings = _readings(places, {host: answers[worker] for host, worker in worker_of.items()}, ranks, self.env)
            speed = judge_speed(readings)
        findings = sorted(
            [*judge_facts(readings.hosts, len(places)), *speed], key=lambda each: each.level is not Level.BAD
        )
        for each in findings:
            _log.info("cluster check", level=str(each.level), host=each.host, subject=each.subject, text=each.text)
        busy = tuple(HostReading(host, (), busy=runs) for host, runs in others.items())
        readings = dataclasses.replace(readings, hosts=(*readings.hosts, *busy))
        return Report(self.depth.name, readings, tuple(findings), time.monotonic() - began)

    def without_bad(self, report: Report, places: Sequence[RankPlace]) -> Report:
        """Leave the bad hosts out, and measure the all-reduce of all ranks on the other hosts."""
        bad = report.bad
        left = _numbered([place for place in places if place.slot.host not in bad])
        everyone, error = None, ""
        if bad and len({place.slot.host for place in left}) > 1:
            began = time.monotonic()
            everyone, error = _everyone(self._measured(left, self._plan(left, only="all")))
            report = dataclasses.replace(report, seconds=report.seconds + time.monotonic() - began)
        return dataclasses.replace(report, left_out=bad, everyone_else=everyone, everyone_else_error=error)

    def _plan(self, places: Sequence[RankPlace], only: str = "") -> ProbePlan:
        gpu = self.on_gpus and all(place.slot.gpu for place in places)
        return self.depth.plan(len({place.slot.host for place in places}), gpu=gpu, only=only)

    def _measured(self, places: Sequence[RankPlace], plan: ProbePlan) -> list[RankReading]:
        return run_probes(self.worker_group, places, plan, self.env, self.depth.deadline_s, self.check)


def _readings(
    places: Sequence[RankPlace], answers: Mapping[str, Answer], ranks: Sequence[RankReading], env: Mapping[str, str]
) -> Readings:
    """Return all readings by host, in the order of node ranks."""
    hosts = []
    for host in dict.fromkeys(place.slot.host for place in sorted(places, key=lambda each: each.node_rank)):
        indices = [index for index, place in enumerate(places) if place.slot.host == host]
        workers = tuple(dict.fromkeys(places[index].slot.worker for index in indices))
        answer = answers[host]
        facts = answer.facts.with_env(env) if answer.facts is not None else None
        hosts.append(
            HostReading(host, workers, facts, answer.clock, tuple(ranks[index] for index in indices), answer.error)
        )
    return Readings(tuple(hosts), pairs_of(hosts), *_everyone(ranks))


def _may_be_disturbed(findings: Sequence[Finding], ranks: Sequence[RankReading]) -> bool:
    """Return whether there are bad values but no failures."""
    failed = any(rank.error or rank.failures() for rank in ranks)
    return not failed and any(each.level is Level.BAD and each.subject != "throttling" for each in findings)


def _numbered(places: Sequence[RankPlace]) -> list[RankPlace]:
    """Return the places with new rank numbers, without gaps for the hosts that were left out."""
    hosts = list(dict.fromkeys(place.slot.host for place in places))
    return [
        dataclasses.replace(place, rank=rank, node_rank=hosts.index(place.slot.host))
        for rank, place in enumerate(places)
    ]


def _everyone(ranks: Sequence[RankReading]) -> tuple[Mapping[str, float] | None, str]:
    """Return the all-reduce of all ranks as rank 0 has measured it, or why it failed."""
    for rank in ranks:
        for line in rank.failures():
            if line.stage == "all":
                return None, line.text or rank.error
    for rank in ranks:
        for line in rank.lines:
            if (line.stage, line.status) == ("all", "done"):
                return line.values, ""
            if (line.stage, line.status) == ("all", "skipped"):
                return None, line.text
    return None, ""
