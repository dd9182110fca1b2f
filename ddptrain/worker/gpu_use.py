"""Measures how busy a GPU is, with NVML through ctypes: no Python package is needed and CUDA is not initialized."""

from __future__ import annotations

import ctypes
import functools

_SUCCESS = 0


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t: percent of the last sample period in which a kernel ran, and in which memory was accessed."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def gpu_percent(name: str) -> int | None:
    """The utilization of a GPU in percent. `name` is an entry of CUDA_VISIBLE_DEVICES: an index or a UUID.

    None if it cannot be measured: without an NVIDIA driver, or for a MIG instance.
    """
    nvml = _nvml()
    handle = ctypes.c_void_p()
    if nvml is None or not _find_device(nvml, name, handle):
        return None
    use = _Utilization()
    return int(use.gpu) if nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)) == _SUCCESS else None


def _find_device(nvml: ctypes.CDLL, name: str, handle: ctypes.c_void_p) -> bool:
    if name.isdigit():
        status = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
    else:
        status = nvml.nvmlDeviceGetHandleByUUID(ctypes.c_char_p(name.encode()), ctypes.byref(handle))
    return bool(status == _SUCCESS)


@functools.cache
def _nvml() -> ctypes.CDLL | None:
    """The initialized NVML library, which stays open until the process ends; None without an NVIDIA driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return nvml if nvml.nvmlInit_v2() == _SUCCESS else None
