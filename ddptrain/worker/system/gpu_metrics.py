"""Metrics of GPUs, read with NVML: CUDA is not initialized, and no memory of the GPU is used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

Measure = Callable[[Any, Any], float]

# The function that reads each metric; its arguments are NVML's module and a device handle.
_MEASURES: dict[str, Measure] = {
    "gpu_percent": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "gpu_memory_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "gpu_memory_total_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    "gpu_power_w": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
    "gpu_temperature_c": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "gpu_clock_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "gpu_clock_max_mhz": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "gpu_throttle": lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
    "gpu_ecc_errors": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(
        gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    ),
    "gpu_processes": lambda nvml, gpu: len(nvml.nvmlDeviceGetComputeRunningProcesses(gpu)),
    # NVML counts for 20 ms, in which this thread sleeps; its unit is kB/s.
    "gpu_pcie_receive_bytes_s": lambda nvml, gpu: (
        nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_RX_BYTES) * 1e3
    ),
    "gpu_pcie_send_bytes_s": lambda nvml, gpu: (
        nvml.nvmlDeviceGetPcieThroughput(gpu, nvml.NVML_PCIE_UTIL_TX_BYTES) * 1e3
    ),
}


class GpuReader:
    """Reads GPUs. A metric that a GPU cannot measure (a MIG instance has no utilization) is not requested again."""

    def __init__(self, nvml: Any = None) -> None:
        """`nvml`: the module to use, for tests; by default that of nvidia-ml-py, if there is an NVIDIA driver."""
        self._nvml = nvml
        self._refused: dict[str, set[str]] = {}

    def read(self, name: str, metrics: Iterable[str] = tuple(_MEASURES)) -> dict[str, float]:
        """Return the metrics of a GPU; {} without NVML.

        `name` is an entry of CUDA_VISIBLE_DEVICES: an index or a UUID.
        """
        try:
            nvml = self._nvml or _nvml()
        except Exception:  # no driver, or no nvidia-ml-py, whose exceptions then do not exist
            return {}
        values: dict[str, float] = {}
        refused = self._refused.setdefault(name, set())
        lasting = nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NoPermission
        with suppress(nvml.NVMLError):
            by_index = name.isdigit()
            gpu = nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else nvml.nvmlDeviceGetHandleByUUID(name)
            for metric in set(metrics) - refused:
                try:
                    values[metric] = float(_MEASURES[metric](nvml, gpu))
                except Exception as error:  # nvidia-ml-py has an error of another class for drivers that are too old
                    if isinstance(error, lasting) or not isinstance(error, nvml.NVMLError):
                        refused.add(metric)
        return values


@functools.cache
def _nvml() -> Any:
    """Return the initialized NVML, which stays open until the process ends. Raises NVMLError, ImportError."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


_reader = GpuReader()


def gpu_percent(name: str) -> int | None:
    """Return the utilization of a GPU in percent; None without a driver, or for a MIG instance."""
    percent = _reader.read(name, ("gpu_percent",)).get("gpu_percent")
    return int(percent) if percent is not None else None
