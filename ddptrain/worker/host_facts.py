"""The process that reads the facts of a worker's host.

It is a separate process, because a broken disk or GPU may hang it.

Arguments: the scratch folder, and the interface with the worker's address. Writes HostFacts as JSON to stdout.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from ddptrain.errors import one_line
from ddptrain.file_ops import text_or_empty
from ddptrain.gpus import usable_cores
from ddptrain.nvml import read_gpus
from ddptrain.protocol.cluster_check import Fabric, GpuFacts, HostFacts, Interface, network_variables

_MB = 10**6
_PACKAGES = ("ddptrain", "torch", "distributed")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_WRITE_S = 0.25
_WRITE_BYTES = 128 * _MB
_CHUNK_BYTES = 4 * _MB
_SHM = Path("/dev/shm")  # noqa: S108  # the subject of the check; nothing is written there
_RDMA = Path("/sys/class/infiniband")
_ROUTES = Path("/proc/net/route")
_ROUTE_UP = 0x1


def main() -> None:
    """Print the facts."""
    scratch, interface = sys.argv[1:3]
    print(host_facts(Path(scratch), interface).to_json(), flush=True)


def host_facts(scratch: Path, interface: str) -> HostFacts:
    """Return the facts of this host; `problems` names what can't be read."""
    problems: list[str] = []
    gpus, driver = _gpus(problems)
    memory = psutil.virtual_memory()
    shm_mb, shm_free_mb = _space(_SHM, problems)
    scratch_mb, scratch_free_mb = _space(scratch, problems)
    return HostFacts(
        hostname=socket.gethostname(),
        versions=_versions(driver),
        cores=usable_cores(),
        memory_mb=memory.total // _MB,
        memory_free_mb=memory.available // _MB,
        shm_mb=shm_mb,
        shm_free_mb=shm_free_mb,
        scratch=str(scratch),
        scratch_mb=scratch_mb,
        scratch_free_mb=scratch_free_mb,
        scratch_write_mb_s=_write_speed(scratch, problems),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        interface=interface,
        interfaces=tuple(_interfaces()),
        routes=tuple(routes_of(_ROUTES.read_text())) if _ROUTES.exists() else (),
        fabrics=tuple(fabrics_of(_RDMA)),
        gpus=gpus,
        network_env=network_variables(os.environ),
        problems=tuple(problems),
    )


def _gpus(problems: list[str]) -> tuple[tuple[GpuFacts, ...], str]:
    try:
        return read_gpus()
    except Exception as error:  # NVML raises one class per fault; the check names it
        problems.append(f"the GPUs can't be read: {one_line(error)}")
        return (), ""


def _versions(driver: str) -> dict[str, str]:
    versions = {"python": platform.python_version(), "driver": driver}
    versions |= {name: _version((name,)) for name in _PACKAGES} | {"nccl": _version(_NCCL)}
    return {name: version for name, version in versions.items() if version}


def _version(packages: Iterable[str]) -> str:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _space(folder: Path, problems: list[str]) -> tuple[int, int]:
    """Return size and free space in MB; 0 and 0 if the folder can't be read."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        problems.append(f"{folder} can't be read: {error.strerror}")
        return 0, 0
    return usage.total // _MB, usage.free // _MB


def _write_speed(folder: Path, problems: list[str]) -> float | None:
    """Write a file with fsync for about 0.25 s. Return the speed in MB/s; None if no file can be written."""
    chunk = os.urandom(_CHUNK_BYTES)
    try:
        limit = min(shutil.disk_usage(folder).free // 10, _WRITE_BYTES)  # the disk must not become full
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            began, written = time.monotonic(), 0
            while written == 0 or (time.monotonic() - began < _WRITE_S and written < limit):
                written += file.write(chunk)
            os.fsync(file.fileno())
            return round(written / _MB / max(time.monotonic() - began, 1e-6), 1)
    except OSError as error:
        problems.append(f"no file can be written in {folder}: {error.strerror}")
        return None


def _interfaces() -> Iterable[Interface]:
    stats = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        ips = tuple(each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6))
        if name in stats:
            state = stats[name]
            yield Interface(name, ips, max(0, int(state.speed)), int(state.mtu), bool(state.isup))


def routes_of(table: str) -> Iterable[str]:
    """Return the IPv4 routes of /proc/net/route, as `10.0.0.0/16 eth0`, or `default eth0`."""
    for row in table.splitlines()[1:]:
        fields = row.split()
        if len(fields) < 8 or not int(fields[3], 16) & _ROUTE_UP:
            continue
        # The numbers are in the byte order of the host.
        address = socket.inet_ntoa(int(fields[1], 16).to_bytes(4, sys.byteorder))
        bits = int(fields[7], 16).bit_count()
        yield f"{f'{address}/{bits}' if bits else 'default'} {fields[0]}"


def fabrics_of(folder: Path) -> Iterable[Fabric]:
    """Return the ports of the RDMA devices in /sys/class/infiniband."""
    for port in sorted(folder.glob("*/ports/*")):
        device = port.parent.parent.name
        layer = text_or_empty(port / "link_layer").strip()
        kind = "EFA" if device.startswith("efa") else "RoCE" if layer == "Ethernet" else layer or "unknown"
        rate = text_or_empty(port / "rate").strip().partition(" ")[0]  # "200 Gb/sec (4X HDR)"
        gbit_s = float(rate) if rate.replace(".", "", 1).isdigit() else 0.0
        yield Fabric(device, kind, "ACTIVE" in text_or_empty(port / "state"), gbit_s)


if __name__ == "__main__":
    main()
