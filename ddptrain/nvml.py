"""Reads facts of NVIDIA GPUs through NVML. CUDA is not initialized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

from ddptrain.protocol import system_metrics
from ddptrain.protocol.host_facts import GpuFacts

_MB = 10**6


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
    return tuple(system_metrics.throttle_reasons(bits & ~pynvml.nvmlClocksEventReasonSwPowerCap))


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
