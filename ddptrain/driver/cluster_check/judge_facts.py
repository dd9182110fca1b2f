"""Judges the facts of hosts: versions, GPUs, memory, disk, clock, limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddptrain.driver.cluster_check.findings import Finding, Level, Limits, below_median, usual
from ddptrain.driver.cluster_check.readings import HostReading
from ddptrain.protocol.cluster_check import GpuFacts, HostFacts

_SHM_BAD_MB, _SHM_WARNING_MB = 100, 1_000  # Docker's default of 64 MB breaks DataLoader workers and NCCL
_DISK_BAD_MB, _DISK_WARNING_MB = 1_000, 10_000
_MEMORY_WARNING = 0.1  # of the memory
_WRITE_SPEED = Limits(bad=0.2, warning=0.5)
_SLOW_DISK_MB_S = 20.0
_CLOCK_BAD_S, _CLOCK_WARNING_S = 1.0, 0.1
_FILES_BASE, _FILES_PER_RANK = 256, 4  # open files of a process; gloo opens a connection to each other rank
_FILES_WARNING = 1_024
_GPU_MEMORY_USED = 0.05
_TEMPERATURE_C = 90
_ESSENTIAL = frozenset({"ddptrain", "torch", "python", "nccl"})
_COMPARED_PARTS = {"python": 2, "distributed": 2}  # how many parts of the version must be equal


def judge_facts(hosts: Sequence[HostReading], ranks: int) -> list[Finding]:
    """Return the findings about facts of these hosts, for a run of `ranks` ranks."""
    findings: list[Finding] = []
    known = [(host, host.facts) for host in hosts if host.facts is not None]
    for host in hosts:
        if host.facts is None:
            findings.append(Finding(Level.BAD, host.host, "answer", host.error or "no facts of this host"))
        findings += _clock(host)
    for host, facts in known:
        findings += [
            *(Finding(Level.BAD, host.host, "reading", problem) for problem in facts.problems),
            *_memory(host.host, facts),
            *_disk(host.host, facts),
            *_limits(host.host, facts, ranks),
            *(finding for gpu in facts.gpus for finding in _gpu(host.host, gpu)),
        ]
    findings += _versions(known)
    findings += _differences(known)
    speeds = {host.host: facts.scratch_write_mb_s for host, facts in known if facts.scratch_write_mb_s is not None}
    findings += below_median(speeds, "disk", "MB/s written", _WRITE_SPEED)
    return findings


def _clock(host: HostReading) -> Iterable[Finding]:
    if host.clock is None:
        return
    certain_s = abs(host.clock.offset_s) - host.clock.uncertainty_s
    if certain_s > _CLOCK_WARNING_S:
        level = Level.BAD if certain_s > _CLOCK_BAD_S else Level.WARNING
        way = "ahead of" if host.clock.offset_s > 0 else "behind"
        text = f"the clock is {abs(host.clock.offset_s):.2f} s {way} the driver's"
        yield Finding(level, host.host, "clock", text, "synchronize the clocks (chrony, systemd-timesyncd)")


def _memory(host: str, facts: HostFacts) -> Iterable[Finding]:
    if facts.memory_free_mb < _MEMORY_WARNING * facts.memory_mb:
        text = f"{facts.memory_free_mb} MB of {facts.memory_mb} MB are available"
        yield Finding(Level.WARNING, host, "memory", text, "look for other processes on this host")
    if facts.shm_mb > 0 and facts.shm_free_mb < _SHM_WARNING_MB:
        level = Level.BAD if facts.shm_free_mb < _SHM_BAD_MB else Level.WARNING
        text = f"{facts.shm_free_mb} MB of {facts.shm_mb} MB are free in /dev/shm"
        yield Finding(level, host, "shm", text, "start containers with a larger one: docker run --shm-size 8g")


def _disk(host: str, facts: HostFacts) -> Iterable[Finding]:
    if facts.scratch_mb and facts.scratch_free_mb < _DISK_WARNING_MB:
        level = Level.BAD if facts.scratch_free_mb < _DISK_BAD_MB else Level.WARNING
        text = f"{facts.scratch_free_mb} MB of {facts.scratch_mb} MB are free in {facts.scratch}"
        yield Finding(level, host, "disk", text, "checkpoints and logs wait there: free some space")
    if facts.scratch_write_mb_s is not None and facts.scratch_write_mb_s < _SLOW_DISK_MB_S:
        text = f"{facts.scratch_write_mb_s:.3g} MB/s are written to {facts.scratch}"
        yield Finding(Level.WARNING, host, "disk", text, "use a local disk for the workers' folder")


def _limits(host: str, facts: HostFacts, ranks: int) -> Iterable[Finding]:
    needed = _FILES_BASE + _FILES_PER_RANK * ranks
    if 0 <= facts.open_files < max(needed, _FILES_WARNING):
        level = Level.BAD if facts.open_files < needed else Level.WARNING
        text = f"a process may open {facts.open_files} files; {ranks} ranks need about {needed}"
        yield Finding(level, host, "open files", text, "raise it where the worker starts: ulimit -n 65536")


def _gpu(host: str, gpu: GpuFacts) -> Iterable[Finding]:
    name = f"GPU {gpu.index} ({gpu.name})"
    if gpu.ecc_errors:
        text = f"{name} has {gpu.ecc_errors} uncorrected memory errors since its driver was loaded"
        yield Finding(Level.BAD, host, "ECC", text, "reset the GPU; replace it if they come again")
    if gpu.remap_pending:
        text = f"{name} waits for a reset to replace bad memory rows, or could not replace them"
        yield Finding(Level.BAD, host, "ECC", text, "reset the GPU; replace it if that does not help")
    if gpu.throttled:
        text = f"{name} reduces its clocks: {', '.join(gpu.throttled)}"
        yield Finding(Level.BAD, host, "throttling", text, "check cooling and power supply")
    if gpu.temperature_c is not None and gpu.temperature_c >= _TEMPERATURE_C:
        text = f"{name} has {gpu.temperature_c} degrees Celsius"
        yield Finding(Level.WARNING, host, "temperature", text, "check the cooling")
    if gpu.memory_used_mb > _GPU_MEMORY_USED * gpu.memory_mb:
        text = f"{gpu.memory_used_mb} MB of {gpu.memory_mb} MB of {name} are in use by other processes"
        yield Finding(Level.WARNING, host, "GPU memory", text, "nvidia-smi names these processes")
    if gpu.pcie_width is not None and gpu.pcie_width_max is not None and gpu.pcie_width < gpu.pcie_width_max:
        text = f"{name} uses {gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes"
        yield Finding(Level.WARNING, host, "PCIe", text, "check slot and riser; virtual machines may report it wrongly")


def _versions(known: Sequence[tuple[HostReading, HostFacts]]) -> Iterable[Finding]:
    for name in dict.fromkeys(name for _, facts in known for name in facts.versions):
        versions = {host.host: _compared_version(name, facts.versions.get(name, "")) for host, facts in known}
        common = usual(versions.values())
        level = Level.BAD if name in _ESSENTIAL else Level.WARNING
        if common is None:
            listed = ", ".join(f"{version or 'none'} on {host}" for host, version in versions.items())
            yield Finding(level, "", "versions", f"{name}: {listed}", "install the same version everywhere")
            continue
        for host, version in versions.items():
            if version != common:
                text = f"{name} {version or 'is missing'}, most hosts have {common or 'none'}"
                yield Finding(level, host, "versions", text, "install the same version everywhere")


def _compared_version(name: str, version: str) -> str:
    parts = _COMPARED_PARTS.get(name)
    return ".".join(version.split(".")[:parts]) if parts else version


def _differences(known: Sequence[tuple[HostReading, HostFacts]]) -> Iterable[Finding]:
    """Yield a finding for each value of a host that differs from most other hosts."""
    nvlinks = {host.host: str(min(gpu.nvlinks for gpu in facts.gpus)) for host, facts in known if facts.gpus}
    for subject, level, values in (
        ("GPUs", Level.BAD, {host.host: _listed(facts) for host, facts in known}),
        ("NVLink", Level.BAD, nvlinks),
        ("cores", Level.WARNING, {host.host: str(facts.cores) for host, facts in known}),
    ):
        common = usual(values.values())
        for host, value in values.items():
            if common is not None and value != common:
                yield Finding(level, host, subject, f"{value}, most hosts have {common}")
    memory = {host.host: float(facts.memory_mb) for host, facts in known}
    yield from below_median(memory, "memory", "MB", Limits(bad=0.0, warning=0.7))


def _listed(facts: HostFacts) -> str:
    """Return the GPUs as text, for example `8 x NVIDIA H100 80GB HBM3`."""
    names = dict.fromkeys(gpu.name for gpu in facts.gpus)
    counts = [f"{sum(gpu.name == name for gpu in facts.gpus)} x {name}" for name in names]
    return " and ".join(counts) or "no GPU"
