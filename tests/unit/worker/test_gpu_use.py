"""GPU utilization is read from NVML, and is unknown without an NVIDIA driver."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from ddptrain.worker import gpu_use


class Nvml:  # with the names of the C library
    """NVML with one GPU (0 or "GPU-abc") that is busy for 37 % of the time; MIG instances are refused."""

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:  # noqa: N802
        return self._give(index.value == 0, handle)

    def nvmlDeviceGetHandleByUUID(self, name: ctypes.c_char_p, handle: Any) -> int:  # noqa: N802
        return self._give(name.value in {b"GPU-abc", b"MIG-abc"}, handle, 2 if name.value == b"MIG-abc" else 1)

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, use: Any) -> int:  # noqa: N802
        use._obj.gpu = 37
        return 0 if handle.value == 1 else 3

    def _give(self, there: bool, handle: Any, value: int = 1) -> int:
        handle._obj.value = value
        return 0 if there else 6


@pytest.mark.parametrize(
    ("name", "percent"), [("0", 37), ("GPU-abc", 37), ("1", None), ("MIG-abc", None), ("nothing", None)]
)
def test_use_is_asked_by_index_or_uuid(name: str, percent: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_use, "_nvml", Nvml)
    assert gpu_use.gpu_percent(name) == percent


def test_use_is_unknown_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_use, "_nvml", lambda: None)
    assert gpu_use.gpu_percent("0") is None
