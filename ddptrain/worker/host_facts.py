"""`python -m ddptrain.worker.host_facts SCRATCH`: prints HostFacts as JSON.

It is a separate process, because a broken disk or GPU may hang it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
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
# The version of each is that of the first package which is installed.
_PACKAGES = {
    "ddptrain": ("ddptrain",),
    "torch": ("torch",),
    "distributed": ("distributed",),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"),
}
_SHM = Path("/dev/shm")  # noqa: S108  # the subject of the check; nothing is written there


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU as NVML reports it. Memory in MB (10^6 bytes).

    throttled: reasons why its clocks are reduced by the hardware. ecc_errors: uncorrected, since the driver was loaded;
    None if the device does not count them.
    """

    index: int
    name: str
    memory_mb: int
    memory_used_mb: int
    ecc_errors: int | None = None
    throttled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The resources of a worker's host. Sizes in MB (10^6 bytes).

    versions: of Python, packages and driver, by name. problems: what could not be read, one line each.
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
    gpus: tuple[GpuFacts, ...] = ()
    problems: tuple[str, ...] = ()


def host_facts(scratch: Path) -> HostFacts:
    """Return the facts of this host; `problems` names what can't be read."""
    problems: list[str] = []
    gpus: tuple[GpuFacts, ...] = ()
    driver = ""
    try:
        gpus, driver = read_gpus()
    except Exception as error:  # NVML raises one class per fault; the check names it
        problems.append(f"the GPUs can't be read: {one_line(error)}")
    versions = {"python": platform.python_version(), "driver": driver}
    versions |= {name: _version(packages) for name, packages in _PACKAGES.items()}
    memory = psutil.virtual_memory()
    return HostFacts(
        socket.gethostname(),
        {name: version for name, version in versions.items() if version},
        usable_cores(),
        memory.total // _MB,
        memory.available // _MB,
        *_space(_SHM, problems),
        str(scratch),
        *_space(scratch, problems),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        gpus=gpus,
        problems=tuple(problems),
    )


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


def read_gpus() -> tuple[tuple[GpuFacts, ...], str]:
    """Return all GPUs and the version of the NVIDIA driver; () and "" without a driver.

    Raises NVMLError if a GPU does not answer.
    """
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return (), ""
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(_facts(*each) for each in enumerate(handles)), _text(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _facts(index: int, handle: Any) -> GpuFacts:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    reduced = _if_known(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    return GpuFacts(
        index,
        _text(pynvml.nvmlDeviceGetName(handle)),
        int(memory.total) // _MB,
        int(memory.used) // _MB,
        _if_known(pynvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected),
        tuple(news.throttle_reasons(reduced & ~pynvml.nvmlClocksEventReasonSwPowerCap)),  # a power limit is normal
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
    print(json.dumps(dataclasses.asdict(host_facts(Path(sys.argv[1])))), flush=True)
