"""The process that reads the facts of a worker's host.

It is a separate process, because a broken disk or GPU may hang it.

Arguments: the scratch folder, and the interface with the worker's address. Writes HostFacts as JSON to stdout.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml

from ddptrain.errors import one_line
from ddptrain.gpus import usable_cores
from ddptrain.protocol import news

_MB = 10**6
_PACKAGES = ("ddptrain", "torch", "distributed")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_SHM = Path("/dev/shm")  # noqa: S108  # the subject of the check; nothing is written there
_NETWORK_VARIABLES = ("NCCL_", "GLOO_", "FI_", "UCX_")


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface. speed_mbit is 0 if the system does not know it."""

    name: str
    speed_mbit: int
    is_up: bool


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU as NVML reports it; None if the device or the driver does not report a value. Memory in MB (10^6 bytes).

    throttled: reasons why its clocks are reduced by the hardware. ecc_errors: uncorrected, since the driver was loaded.
    """

    index: int
    uuid: str
    name: str
    memory_mb: int
    memory_used_mb: int
    ecc_errors: int | None = None
    remap_pending: bool | None = None
    throttled: tuple[str, ...] = ()
    temperature_c: int | None = None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The identity and the resources of a worker's host. Sizes in MB (10^6 bytes).

    versions: of Python, packages and driver, by name. interface: the one with the worker's address. network_env: the
    variables of NCCL and gloo that ranks get. listens: whether a process can listen on a port of that address.
    problems: what could not be read, one line each.
    """

    hostname: str
    versions: Mapping[str, str]
    cores: int
    memory_mb: int
    memory_free_mb: int
    shm_mb: int
    shm_free_mb: int
    scratch: str
    scratch_mb: int
    scratch_free_mb: int
    open_files: int
    interface: str
    interfaces: tuple[Interface, ...] = ()
    gpus: tuple[GpuFacts, ...] = ()
    network_env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    problems: tuple[str, ...] = ()


def main() -> None:
    """Print the facts."""
    scratch, interface = sys.argv[1:3]
    print(json.dumps(dataclasses.asdict(host_facts(Path(scratch), interface))), flush=True)


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
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        interface=interface,
        interfaces=tuple(_interfaces()),
        gpus=gpus,
        network_env={name: value for name, value in os.environ.items() if name.startswith(_NETWORK_VARIABLES)},
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


def _interfaces() -> Iterable[Interface]:
    for name, state in psutil.net_if_stats().items():
        yield Interface(name, max(0, int(state.speed)), bool(state.isup))


def read_gpus() -> tuple[tuple[GpuFacts, ...], str]:
    """Return all GPUs and the version of the NVIDIA driver; () and "" without a driver.

    Raises NVMLError if a GPU does not answer.
    """
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return (), ""
    try:
        count = pynvml.nvmlDeviceGetCount()
        gpus = tuple(_facts(index, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count))
        return gpus, _text(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def throttle_reasons(handle: Any) -> tuple[str, ...]:
    """Return the reasons why the hardware reduces the clocks of the GPU now, except a power limit, which is normal."""
    bits = _if_known(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    return tuple(news.throttle_reasons(bits & ~pynvml.nvmlClocksEventReasonSwPowerCap))


def _facts(index: int, handle: Any) -> GpuFacts:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    remapped = _if_known(pynvml.nvmlDeviceGetRemappedRows, handle)  # corrected, uncorrected, pending, failure
    return GpuFacts(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_mb=int(memory.total) // _MB,
        memory_used_mb=int(memory.used) // _MB,
        ecc_errors=_if_known(
            pynvml.nvmlDeviceGetTotalEccErrors,
            handle,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        ),
        remap_pending=bool(remapped[2] or remapped[3]) if remapped is not None else None,
        throttled=throttle_reasons(handle),
        temperature_c=_if_known(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
    )


def _if_known(query: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of an NVML function; None if this GPU or its driver does not support the function."""
    try:
        return query(*arguments)
    except (
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_InvalidArgument,
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_NoPermission,
    ):
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":
    main()
