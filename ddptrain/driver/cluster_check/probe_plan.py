"""Plans the measurements of a check: their durations, and the pairs of hosts in each round."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ddptrain.driver.cluster_check.findings import Finding, Level
from ddptrain.protocol.cluster_check import ProbePlan

_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Depth:
    """How thoroughly hosts are checked. Times in seconds; rounds: the most rounds of pairs of hosts."""

    name: str
    gemm_s: float
    copy_s: float
    reduce_s: float
    timeout_s: float
    rounds: int
    cpu_bytes: int
    gpu_bytes: int
    facts_s: float
    deadline_s: float

    def plan(self, hosts: int, *, gpu: bool, only: str = "") -> ProbePlan:
        """Return the plan for ranks on this number of hosts; `only` as in ProbePlan."""
        return ProbePlan(
            rounds=rounds(hosts, self.rounds),
            gemm_s=self.gemm_s,
            copy_s=self.copy_s,
            reduce_s=self.reduce_s,
            timeout_s=self.timeout_s,
            most_bytes=self.gpu_bytes if gpu else self.cpu_bytes,
            gpu=gpu,
            nccl_pairs=gpu and self.name == "deep",
            only=only,
        )


DEPTHS = {
    "quick": Depth("quick", 0.15, 0.1, 0.08, 4.0, 7, _MB, 64 * _MB, facts_s=10.0, deadline_s=30.0),
    "deep": Depth("deep", 5.0, 1.0, 0.5, 10.0, 15, 64 * _MB, 1024 * _MB, facts_s=15.0, deadline_s=90.0),
}


def plan_again(plan: ProbePlan, findings: Sequence[Finding], hosts: Sequence[str]) -> ProbePlan:
    """Return the plan for a second measurement: of everything, or only of bad pairs and of hosts with a bad network.

    hosts: their names, by node rank.
    """
    bad = [each for each in findings if each.level is Level.BAD]
    if any(each.subject != "network" or not each.host for each in bad):
        return plan
    slow = {each.host for each in bad if not each.other}
    slow_pairs = [{each.host, each.other} for each in bad if each.other]
    chosen = [
        tuple(pair for pair in pairs if (names := {hosts[node] for node in pair}) & slow or names in slow_pairs)
        for pairs in plan.rounds
    ]
    return dataclasses.replace(plan, rounds=tuple(pairs for pairs in chosen if pairs), only="pairs")


def rounds(hosts: int, most: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the rounds of a round-robin tournament, at most `most`: in each round, every host is in one pair.

    After all rounds, each pair has measured once. With an odd number of hosts, one host rests in each round.
    """
    if hosts < 2:
        return ()
    circle: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    all_rounds = []
    for _ in range(min(most, len(circle) - 1)):
        half = len(circle) // 2
        pairs = [
            (min(a, b), max(a, b))
            for a, b in zip(circle[:half], reversed(circle[half:]), strict=True)
            if a is not None and b is not None
        ]
        all_rounds.append(tuple(sorted(pairs)))
        circle = [circle[0], circle[-1], *circle[1:-1]]  # the first host stays, the others rotate
    return tuple(all_rounds)
