"""How busy a GPU is, as NVML tells, without the NVIDIA driver's Python package and without touching CUDA."""

from __future__ import annotations

import ctypes
import functools

_SUCCESS = 0


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t: percent of the last moment in which a kernel ran, and in which memory was in use."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def gpu_percent(name: str) -> int | None:
    """The use of a GPU in percent; `name` is an entry of CUDA_VISIBLE_DEVICES: an index, or a UUID.

    None where it can't be measured: there is no NVIDIA driver, or the GPU is a MIG instance.
    """
    nvml = _nvml()
    handle = ctypes.c_void_p()
    if nvml is None or not _found(nvml, name, handle):
        return None
    use = _Utilization()
    return int(use.gpu) if nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)) == _SUCCESS else None


def _found(nvml: ctypes.CDLL, name: str, handle: ctypes.c_void_p) -> bool:
    if name.isdigit():
        status = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
    else:
        status = nvml.nvmlDeviceGetHandleByUUID(ctypes.c_char_p(name.encode()), ctypes.byref(handle))
    return bool(status == _SUCCESS)


@functools.cache
def _nvml() -> ctypes.CDLL | None:
    """NVML, ready for questions; it stays open for the life of the process."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return nvml if nvml.nvmlInit_v2() == _SUCCESS else None
