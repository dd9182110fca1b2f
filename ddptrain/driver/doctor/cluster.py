"""Checks all hosts of a cluster: facts of each host, and a short run that measures every free slot."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from ddptrain.clusters.backends.run_cluster import AttachedCluster
from ddptrain.clusters.scheduler import slots
from ddptrain.config.sections.clusters import ClusterConfig
from ddptrain.driver.connect import connected
from ddptrain.driver.doctor.judge import Check, Result, judge_differences, judge_host, judge_speed
from ddptrain.errors import one_line
from ddptrain.worker import driver_calls
from ddptrain.worker.host_facts import HostFacts

if TYPE_CHECKING:
    from distributed import Client

_FACTS_S = 15.0
_CLOCK_BAD_S, _CLOCK_WARNING_S = 1.0, 0.1
_MEASURE_S = 120.0  # for all: torch on a cold disk, the connections of many ranks


def check_cluster(cluster: str, config: ClusterConfig, tell: Callable[[str], None]) -> list[Check]:
    """Check the hosts of a cluster that is up, and measure with the slots that are free now.

    cluster: its name or address, which `config` has, too. Raises ClusterError and ClusterNotFound if there is no such
    cluster, or it does not answer.
    """
    target = AttachedCluster(config).connect()
    with connected(target, config.start_timeout_s, tell) as client:
        overview: dict[str, Any] = client.run_on_scheduler(slots.overview)
        known: dict[str, str] = {}  # one worker of each host
        for worker in overview["workers"]:
            known.setdefault(worker["host"], worker["address"])
        known = known or {address: address for address in client.nthreads()}
        ranks = sum(worker["slots"] for worker in overview["workers"])
        hosts: list[tuple[HostFacts | None, list[Check]]] = client.sync(_ask_all, client, known, ranks)
    checks = [check for _, of_host in hosts for check in of_host]
    checks += judge_differences([facts for facts, _ in hosts if facts is not None])
    free = sum(worker["slots"] - worker["held"] for worker in overview["workers"])
    if not free or overview["waiting"]:
        why = "no slot is free, or runs wait for slots" if ranks else "its workers have no slots before the first run"
        return [*checks, Check("speed", Result.SKIPPED, f"not measured: {why}")]
    tell(f"measuring {free} free slots")
    return checks + _measured(cluster, free)


async def _ask_all(client: Client, known: Mapping[str, str], ranks: int) -> list[tuple[HostFacts | None, list[Check]]]:
    return list(await asyncio.gather(*(_ask(client, host, worker, ranks) for host, worker in known.items())))


async def _ask(client: Client, host: str, worker: str, ranks: int) -> tuple[HostFacts | None, list[Check]]:
    """Return the facts of a host and their checks, which compare its clock with ours."""

    async def ask(function: Callable[..., Any], *arguments: object) -> Any:
        return (await client.run(function, *arguments, workers=[worker]))[worker]

    error = ""
    try:
        async with asyncio.timeout(_FACTS_S):
            await ask(driver_calls.read_clock)  # opens the connection
            before = time.time()
            there_s = float(await ask(driver_calls.read_clock))
            after = time.time()
            facts = TypeAdapter(HostFacts).validate_json(await ask(driver_calls.host_facts, _FACTS_S))
    except TimeoutError:
        error = f"it does not answer within {_FACTS_S:g} s"
    except Exception as raised:  # a worker's own exception arrives as it was raised there
        error = one_line(raised)
    if error:
        return None, [Check("answer", Result.BAD, error, "cluster logs NAME may say why", host)]
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    gpus = f"{len(facts.gpus)} GPUs" if facts.gpus else "no GPU"
    checks = [Check("host", Result.OK, f"{facts.cores} cores, {gpus}, {versions}"), *judge_host(facts, ranks)]
    ahead_s = there_s - (before + after) / 2
    certain_s = abs(ahead_s) - max(0.0, after - before) / 2
    if certain_s > _CLOCK_WARNING_S:
        result = Result.BAD if certain_s > _CLOCK_BAD_S else Result.WARNING
        text = f"{abs(ahead_s):.2f} s {'ahead of' if ahead_s > 0 else 'behind'} that of this machine"
        checks.append(Check("clock", result, text, "synchronize the clocks (chrony, systemd-timesyncd)"))
    return facts, [dataclasses.replace(check, host=facts.hostname) for check in checks]


def _measured(cluster: str, free: int) -> list[Check]:
    """Run `rank/probes.py` on all free slots, as a run of its own, and judge what it has measured."""
    with tempfile.TemporaryDirectory(prefix="ddptrain-doctor-") as folder:
        config = {
            "name": "doctor",
            "workload": "ddptrain.rank.probes:measure",
            "cluster": {"ranks": {"min": 1, "max": free}},
            "failure": {"hang_timeout_s": 60},
            "results": {"dir": folder},
        }
        (Path(folder) / "doctor.yaml").write_text(json.dumps(config), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "ddptrain", "train", f"{folder}/doctor.yaml"]
        command += ["--cluster", cluster, "--output", "plain"]
        try:
            done = subprocess.run(
                command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=_MEASURE_S, check=False
            )
        except subprocess.TimeoutExpired:
            return [Check("speed", Result.BAD, f"the ranks did not end within {_MEASURE_S:g} s")]
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("*/run.json")]
    if done.returncode or not runs:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return [Check("speed", Result.BAD, f"the ranks can't train together: {last[0]}")]
    return _judged(runs[0]["result"])


def _judged(ranks: Sequence[Mapping[str, Any]]) -> list[Check]:
    gflops: dict[str, list[float]] = {}
    for rank in ranks:
        gflops.setdefault(rank["host"], []).append(rank["gflops"])
    checks = [
        Check("speed", Result.OK, f"{sum(values) / len(values):.3g} GFLOP/s on {len(values)} slots", "", host)
        for host, values in gflops.items()
    ]
    if len(ranks) > 1:
        slowest = min(rank["all_reduce_gb_s"] for rank in ranks)
        checks.append(Check("all-reduce", Result.OK, f"{slowest:.3g} GB/s between {len(ranks)} slots"))
    return [*checks, *judge_speed(gflops, "speed", "GFLOP/s")]
