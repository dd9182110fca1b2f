"""`ddptrain doctor`: checks this machine, or all hosts of a cluster with a short run that measures every free slot.

What may hang, such as a dead disk or GPU, is read by processes of their own, at the same time, each with a time limit.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter

from ddptrain.errors import ClusterError, DdptrainError, one_line
from ddptrain.gpus import default_slots, visible_gpus
from ddptrain.redact import hide_credentials
from ddptrain.storage.object_store import open_folder
from ddptrain.storage.store import is_url
from ddptrain.worker.host_facts import HostFacts

if TYPE_CHECKING:
    from distributed import Client

    from ddptrain.config.sections.clusters import ClusterConfig

Facts = TypeVar("Facts")

_PROCESS_S = 30.0  # torch from a cold disk, or the facts of a GPU that hangs
_FACTS_S, _MEASURE_S = 15.0, 120.0
_CLOCK_BAD_S, _CLOCK_WARNING_S = 1.0, 0.1
_SHM_MB = 100, 1_000  # bad, warning. Docker's default of 64 MB breaks DataLoader workers and NCCL
_DISK_MB = 1_000, 10_000
_FILES_BASE, _FILES_PER_RANK, _FILES_WARNING = 256, 4, 1_024  # gloo opens a connection to each other rank
_GPU_MEMORY_USED = 0.05
_ESSENTIAL = frozenset({"ddptrain", "torch", "python", "nccl", "GPUs"})
_COMPARED_PARTS = {"python": 2, "distributed": 2}  # how many parts of the version must be equal
_MIN_COMPARED = 3  # of two values, nobody knows which one is wrong
_SLOW_BAD, _SLOW_WARNING = 0.5, 0.8  # of the median


class Result(StrEnum):
    """The result of a check; a machine with a bad result is not suitable for a run."""

    OK = "ok"
    WARNING = "warning"
    BAD = "bad"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was checked. hint: what to do, or "". host: which host of a cluster it is about, or ""."""

    subject: str
    result: Result
    text: str
    hint: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """The abilities of torch here. cuda: the version that it was built for, or "". gpus: how many it can use.

    problems: what failed, by subject: torch (all of it), torchvision, GPUs (they can't be listed), gloo.
    """

    torch: str = ""
    cuda: str = ""
    torchvision: str = ""
    gpus: int = 0
    nccl: bool = False
    problems: Mapping[str, str] = field(default_factory=dict)


# --- this machine ---


def check_machine(runs_dir: str, environ: Mapping[str, str]) -> list[Check]:
    """Check this machine for runs in `runs_dir`, a folder or a URL."""
    folder = Path.cwd() if is_url(runs_dir) else Path(runs_dir).absolute()
    folder = next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))
    with ThreadPoolExecutor() as pool:
        facts = pool.submit(_facts, HostFacts, ["ddptrain.worker.host_facts", str(folder)], environ)
        torch = pool.submit(_facts, TorchFacts, ["ddptrain.rank.probes"], environ)
        store = _store(runs_dir)
        (host, problem), (tried, failed) = facts.result(), torch.result()
    tried = tried or TorchFacts(problems={"torch": failed})
    gpus: tuple[str, ...] = ()
    try:
        gpus = visible_gpus(environ)
    except ClusterError as error:
        tried = dataclasses.replace(tried, problems={**tried.problems, "GPUs": one_line(error)})
    present, driver = (len(host.gpus), host.versions.get("driver", "")) if host is not None else (0, "")
    checks = [Check("Python", Result.OK, f"{platform.python_version()}, {sys.executable}")]
    checks += judge_torch(tried, len(gpus), driver, max(0, present - len(gpus)))
    if host is None:
        checks.append(Check("host", Result.BAD, f"its facts can't be read: {problem}"))
    else:
        checks += judge_host(host, default_slots(gpus))
    return [*checks, _ports(), *store]


def _facts(kind: type[Facts], module: Sequence[str], environ: Mapping[str, str]) -> tuple[Facts | None, str]:
    """Run a module with this Python; return the facts that it prints, and why there are none, or ""."""
    command = [sys.executable, "-P", "-m", *module]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_PROCESS_S, check=False)
        if done.returncode:
            return None, _last_line(done)
        return TypeAdapter(kind).validate_json(done.stdout.strip().splitlines()[-1]), ""
    except subprocess.TimeoutExpired:
        return None, f"it does not answer within {_PROCESS_S:g} s; is this machine very busy?"
    except (ValueError, IndexError) as wrong:
        return None, one_line(wrong)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}")


def _ports() -> Check:
    """Check that a process can listen on a port of the loopback interface, and that a connection to it works."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=3.0).close()
    except OSError as error:
        hint = "is the loopback interface up (ip addr), and is no firewall in the way?"
        return Check("ports", Result.BAD, f"no connection to 127.0.0.1: {error.strerror or error}", hint)
    return Check("ports", Result.OK, "a connection to 127.0.0.1 works")


def _store(runs_dir: str) -> list[Check]:
    """Check that the object store of the runs can be listed; [] for a folder."""
    if not is_url(runs_dir):
        return []
    try:
        open_folder(runs_dir).check()
    except DdptrainError as error:
        return [Check("store", Result.BAD, one_line(error))]
    return [Check("store", Result.OK, f"{hide_credentials(runs_dir)} can be listed")]


def judge_torch(facts: TorchFacts, gpus: int, driver: str, hidden: int = 0) -> Iterable[Check]:
    """Yield the checks of torch. gpus: how many CUDA_VISIBLE_DEVICES leaves of those that the NVIDIA driver sees.

    driver: its version. hidden: how many the variable hides.
    """
    problems = facts.problems
    if failed := problems.get("torch"):
        yield Check("torch", Result.BAD, f"torch does not work: {failed}", "install it again: pip install torch")
        return
    yield Check("torch", Result.OK, f"{facts.torch}, {f'for CUDA {facts.cuda}' if facts.cuda else 'without CUDA'}")
    if failed := problems.get("torchvision"):
        hint = "install the torchvision of this torch: pip install --upgrade torch torchvision"
        yield Check("torchvision", Result.BAD, f"{facts.torchvision or 'it'} does not work: {failed}", hint)
    else:
        yield Check("torchvision", Result.OK, facts.torchvision)
    driver, rest = driver or "unknown", f"; CUDA_VISIBLE_DEVICES hides {hidden}" if hidden else ""
    if failed := problems.get("GPUs"):
        yield Check("GPUs", Result.BAD, failed)
    elif not gpus:
        yield Check("GPUs", Result.OK, f"none: ranks train on the CPU{rest}")
    elif not facts.cuda:
        text = f"{gpus} are here, but torch {facts.torch} is built without CUDA"
        yield Check("GPUs", Result.BAD, text, "install a torch with CUDA: https://pytorch.org/get-started")
    elif facts.gpus < gpus:
        text = f"torch for CUDA {facts.cuda} can use {facts.gpus} of {gpus}, with the driver {driver}"
        yield Check("GPUs", Result.BAD, text, "update the driver, or install a torch for an older CUDA")
    else:
        yield Check("GPUs", Result.OK, f"{facts.gpus}, with the driver {driver}{rest}")
    if failed := problems.get("gloo"):
        hint = "set GLOO_SOCKET_IFNAME to an interface that is up (ip addr)"
        yield Check("gloo", Result.BAD, f"an all-reduce with gloo failed: {failed}", hint)
    else:
        yield Check("gloo", Result.OK, "an all-reduce works")
    if gpus and not facts.nccl:
        yield Check("nccl", Result.BAD, "torch is built without NCCL", "install a torch with CUDA")


def judge_host(facts: HostFacts, ranks: int) -> Iterable[Check]:
    """Yield the checks of memory, /dev/shm, disk, limits and GPUs, for `ranks` ranks."""
    yield from (Check("reading", Result.BAD, problem) for problem in facts.problems)
    rooms = [("memory", facts.memory_free_mb, f"of {facts.memory_mb} MB are available", (0, facts.memory_mb // 10), "")]
    if facts.shm_mb:
        hint = "start containers with a larger one: docker run --shm-size 8g"
        rooms.append(("shm", facts.shm_free_mb, "are free in /dev/shm", _SHM_MB, hint))
    if facts.scratch_mb:
        hint = "checkpoints and logs wait there: free some space"
        rooms.append(("disk", facts.scratch_free_mb, f"are free in {facts.scratch}", _DISK_MB, hint))
    for subject, free_mb, text, (bad_mb, warning_mb), hint in rooms:
        result = Result.BAD if free_mb < bad_mb else Result.WARNING if free_mb < warning_mb else Result.OK
        yield Check(subject, result, f"{free_mb} MB {text}", hint if result != Result.OK else "")
    needed = _FILES_BASE + _FILES_PER_RANK * ranks
    if 0 <= facts.open_files < max(needed, _FILES_WARNING):
        result = Result.BAD if facts.open_files < needed else Result.WARNING
        text = f"a process may open {facts.open_files} files; {ranks} ranks need about {needed}"
        yield Check("open files", result, text, "raise it where the worker starts: ulimit -n 65536")
    for gpu in facts.gpus:
        name = f"GPU {gpu.index} ({gpu.name})"
        if gpu.ecc_errors:
            text = f"{name} has {gpu.ecc_errors} uncorrected memory errors"
            yield Check("ECC", Result.BAD, text, "reset the GPU; replace it if that does not help")
        if gpu.throttled:
            text = f"{name} reduces its clocks: {', '.join(gpu.throttled)}"
            yield Check("throttling", Result.BAD, text, "check cooling and power supply")
        if gpu.memory_used_mb > _GPU_MEMORY_USED * gpu.memory_mb:
            text = f"{gpu.memory_used_mb} MB of {gpu.memory_mb} MB of {name} are in use by other processes"
            yield Check("GPU memory", Result.WARNING, text, "nvidia-smi names these processes")


# --- the hosts of a cluster ---


def check_cluster(cluster: str, config: ClusterConfig, tell: Callable[[str], None]) -> list[Check]:
    """Check the hosts of a cluster that is up, and measure with the slots that are free now.

    cluster: its name or address, which `config` has, too. Raises ClusterError and ClusterNotFound if there is no such
    cluster, or it does not answer.
    """
    from ddptrain.clusters.backends.run_cluster import AttachedCluster
    from ddptrain.clusters.scheduler import slots
    from ddptrain.driver.connect import connected

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
    from ddptrain.worker import driver_calls

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


def judge_differences(hosts: Sequence[HostFacts]) -> Iterable[Check]:
    """Yield a check for each host whose versions or GPUs differ from those of most hosts."""

    def version(name: str, facts: HostFacts) -> str:
        return ".".join(facts.versions.get(name, "none").split(".")[: _COMPARED_PARTS.get(name)])

    def gpus(facts: HostFacts) -> str:
        counts = Counter(gpu.name for gpu in facts.gpus)
        return " and ".join(f"{count} x {name}" for name, count in counts.items()) or "no GPU"

    rows = {name: [version(name, facts) for facts in hosts] for facts in hosts for name in facts.versions}
    rows["GPUs"] = [gpus(facts) for facts in hosts]
    hint = "make them equal on all hosts"
    for subject, values in rows.items():
        result = Result.BAD if subject in _ESSENTIAL else Result.WARNING
        usual, count = Counter(values).most_common(1)[0]
        if 2 * count <= len(hosts):
            text = ", ".join(f"{value} on {facts.hostname}" for facts, value in zip(hosts, values, strict=True))
            yield Check(subject, result, f"differs: {text}", hint)
            continue
        for facts, value in zip(hosts, values, strict=True):
            if value != usual:
                yield Check(subject, result, f"{value}; most hosts have {usual}", hint, facts.hostname)


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
        return [Check("speed", Result.BAD, f"the ranks can't train together: {_last_line(done)}")]
    ranks = runs[0]["result"]
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
    return [*checks, *judge_speed(gflops)]


def judge_speed(hosts: Mapping[str, Sequence[float]]) -> Iterable[Check]:
    """Yield a check for each host with a rank clearly below the median of all GFLOP/s; of fewer than three, none."""
    values = [value for of_host in hosts.values() for value in of_host]
    if len(values) < _MIN_COMPARED:
        return
    median = statistics.median(values)
    for host, of_host in hosts.items():
        if (slowest := min(of_host)) < _SLOW_WARNING * median:
            result = Result.BAD if slowest < _SLOW_BAD * median else Result.WARNING
            share = f"{100 * slowest / median:.0f} % of the median of {len(values)} ({median:.3g})"
            hint = "look for other processes on this host"
            yield Check("speed", result, f"{slowest:.3g} GFLOP/s, {share}", hint, host)
