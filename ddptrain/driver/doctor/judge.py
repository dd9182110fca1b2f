"""Judges the facts of this machine. Pure functions."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ddptrain.worker.host_facts import GpuFacts, HostFacts

_SHM_MB = 100, 1_000  # bad, warning. Docker's default of 64 MB breaks DataLoader workers and NCCL
_DISK_MB = 1_000, 10_000
_FILES_BASE, _FILES_PER_RANK = 256, 4  # open files of a process; gloo opens a connection to each other rank
_FILES_WARNING = 1_024
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
    """Yield the checks of memory, /dev/shm, disk, limits, GPUs and interfaces, for `ranks` ranks."""
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
        yield from _gpu_faults(gpu)
    for variable, value in facts.network_env.items():
        missing = [] if value.startswith("^") else [name for name in value.split(",") if not _is_up(name, facts)]
        text = f"{variable} is {value}"
        if missing:
            text += f", but no interface {', '.join(missing)} is up"
            hint = f"use one of {', '.join(facts.interfaces) or 'none'}, or unset it"
            yield Check("network", Result.BAD, text, hint)
        else:
            yield Check("network", Result.OK, text)


def _is_up(name: str, facts: HostFacts) -> bool:
    """Return whether an interface that is up fits a name by NCCL's rules: a prefix, or = and the whole name."""
    name = name.strip()
    return name[1:] in facts.interfaces if name[:1] == "=" else any(up.startswith(name) for up in facts.interfaces)


def _gpu_faults(gpu: GpuFacts) -> Iterable[Check]:
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


def judge_differences(hosts: Sequence[HostFacts]) -> Iterable[Check]:
    """Yield a check for each host whose versions, GPUs or cores differ from those of most hosts."""
    rows = {name: [_version(name, facts) for facts in hosts] for facts in hosts for name in facts.versions}
    rows["GPUs"] = [_listed(facts) for facts in hosts]
    rows["cores"] = [str(facts.cores) for facts in hosts]
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


def _version(name: str, facts: HostFacts) -> str:
    return ".".join(facts.versions.get(name, "none").split(".")[: _COMPARED_PARTS.get(name)])


def _listed(facts: HostFacts) -> str:
    """Return the GPUs as text, for example `8 x NVIDIA H100 80GB HBM3`."""
    counts = Counter(gpu.name for gpu in facts.gpus)
    return " and ".join(f"{count} x {name}" for name, count in counts.items()) or "no GPU"


def judge_speed(hosts: Mapping[str, Sequence[float]], subject: str, unit: str) -> Iterable[Check]:
    """Yield a check for each host with a value clearly below the median of all values; of fewer than three, none.

    hosts: the values of each host's ranks.
    """
    values = [value for of_host in hosts.values() for value in of_host]
    if len(values) < _MIN_COMPARED:
        return
    median = statistics.median(values)
    for host, of_host in hosts.items():
        if (slowest := min(of_host)) < _SLOW_WARNING * median:
            result = Result.BAD if slowest < _SLOW_BAD * median else Result.WARNING
            text = f"{slowest:.3g} {unit}, {100 * slowest / median:.0f} % of the median of {len(values)} ({median:.3g})"
            yield Check(subject, result, text, "look for other processes on this host", host)
