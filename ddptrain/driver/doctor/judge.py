"""Judges the facts of this machine. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ddptrain.driver.cluster_check.judge_facts import judge_facts
from ddptrain.driver.cluster_check.readings import HostReading
from ddptrain.protocol.cluster_check import HostFacts

_CLOCK_BAD_S, _CLOCK_WARNING_S = 60.0, 3.0  # the Date of a server has whole seconds, and arrives with a delay


class Result(StrEnum):
    """The result of a check; a machine with a bad result is not suitable for a run."""

    OK = "ok"
    WARNING = "warning"
    BAD = "bad"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was checked. hint: what to do, or ""."""

    subject: str
    result: Result
    text: str
    hint: str = ""


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
    if failed := facts.problems.get("torch"):
        yield Check("torch", Result.BAD, f"torch does not work: {failed}", "install it again: pip install torch")
        return
    built = f"for CUDA {facts.cuda}" if facts.cuda else "without CUDA"
    yield Check("torch", Result.OK, f"{facts.torch}, {built}")
    if failed := facts.problems.get("torchvision"):
        hint = "install the torchvision of this torch: pip install --upgrade torch torchvision"
        yield Check("torchvision", Result.BAD, f"{facts.torchvision or 'it'} does not work: {failed}", hint)
    else:
        yield Check("torchvision", Result.OK, facts.torchvision)
    yield _gpus(facts, gpus, driver, f"; CUDA_VISIBLE_DEVICES hides {hidden}" if hidden else "")
    if failed := facts.problems.get("gloo"):
        hint = "set GLOO_SOCKET_IFNAME to an interface that is up (ip addr)"
        yield Check("gloo", Result.BAD, f"an all-reduce with gloo failed: {failed}", hint)
    else:
        yield Check("gloo", Result.OK, "an all-reduce works")
    if gpus and not facts.nccl:
        yield Check("nccl", Result.BAD, "torch is built without NCCL", "install a torch with CUDA")


def _gpus(facts: TorchFacts, gpus: int, driver: str, hidden: str) -> Check:
    if failed := facts.problems.get("GPUs"):
        return Check("GPUs", Result.BAD, failed)
    if not gpus:
        return Check("GPUs", Result.OK, f"none: ranks train on the CPU{hidden}")
    if not facts.cuda:
        text = f"{gpus} are here, but torch {facts.torch} is built without CUDA"
        return Check("GPUs", Result.BAD, text, "install a torch with CUDA: https://pytorch.org/get-started")
    if facts.gpus < gpus:
        text = f"torch for CUDA {facts.cuda} can use {facts.gpus} of {gpus}, with the driver {driver or 'unknown'}"
        hint = "update the driver, or install a torch for an older CUDA"
        return Check("GPUs", Result.BAD, text, hint)
    return Check("GPUs", Result.OK, f"{facts.gpus}, with the driver {driver or 'unknown'}{hidden}")


def judge_host(facts: HostFacts, ranks: int) -> Iterable[Check]:
    """Return the checks of memory, disk, limits and GPUs: those of a cluster check, for `ranks` ranks."""
    findings = judge_facts([HostReading(facts.hostname, (), facts)], ranks)
    yield from (Check(each.subject, Result(each.level), each.text, each.hint) for each in findings)
    subjects = {each.subject for each in findings}
    if "memory" not in subjects:
        yield Check("memory", Result.OK, f"{facts.memory_free_mb} MB of {facts.memory_mb} MB are available")
    if "disk" not in subjects and "reading" not in subjects:
        speed = f", {facts.scratch_write_mb_s:.0f} MB/s" if facts.scratch_write_mb_s is not None else ""
        yield Check("disk", Result.OK, f"{facts.scratch_free_mb} MB are free in {facts.scratch}{speed}")
    yield from _interfaces(facts)


def _interfaces(facts: HostFacts) -> Iterable[Check]:
    """Yield whether the interfaces in the variables of gloo and NCCL exist and are up."""
    up = [each.name for each in facts.interfaces if each.is_up]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = facts.network_env.get(variable, "")
        if not value:
            continue
        missing = [name for name in value.split(",") if not _names_one(name.strip(), up)]
        text = f"{variable} is {value}"
        if value.startswith("^") or not missing:
            yield Check("network", Result.OK, text)
        else:
            text += f", but no interface {', '.join(missing)} is up"
            yield Check("network", Result.BAD, text, f"use one of {', '.join(up) or 'none'}, or unset it")


def _names_one(name: str, up: Sequence[str]) -> bool:
    """Return whether NCCL's rules (a prefix, or = and a name) find an interface."""
    return name[1:] in up if name.startswith("=") else any(each.startswith(name) for each in up)


def judge_clock(offset_s: float | None, server: str) -> Check:
    """Return the check of the clock. offset_s: how far it is ahead of `server`; None: no server was asked."""
    if offset_s is None:
        return Check("clock", Result.SKIPPED, "not compared: no server is configured or reachable")
    away_s = abs(offset_s)
    if away_s <= _CLOCK_WARNING_S:
        return Check("clock", Result.OK, f"as that of {server}")
    way = "ahead of" if offset_s > 0 else "behind"
    result = Result.BAD if away_s > _CLOCK_BAD_S else Result.WARNING
    hint = "synchronize the clock (chrony, systemd-timesyncd)"
    return Check("clock", result, f"{away_s:.0f} s {way} that of {server}", hint)
