"""GPUs as NVML describes them; the library is a stub here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from ddptrain.worker.host_facts import read_gpus


def unsupported(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two GPUs; the second is of a kind without ECC and remapped rows."""
    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlSystemGetDriverVersion": lambda: "580.65",
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=80_000_000_000, used=1_000_000),
        "nvmlDeviceGetUUID": lambda index: f"GPU-{index}",
        "nvmlDeviceGetName": lambda _: b"NVIDIA H100",
        "nvmlDeviceGetTotalEccErrors": lambda index, *_: 3 if index == 0 else unsupported(),
        "nvmlDeviceGetRemappedRows": lambda index: (0, 1, 1, 0) if index == 0 else unsupported(),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: (
            pynvml.nvmlClocksEventReasonHwThermalSlowdown | pynvml.nvmlClocksEventReasonGpuIdle
        ),
        "nvmlDeviceGetTemperature": lambda *_: 40,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    return answers


def test_gpus_are_described_and_unsupported_values_are_left_out(driver: dict[str, Any]) -> None:
    (first, second), version = read_gpus()
    assert version == "580.65"
    assert (first.uuid, first.name, first.memory_mb, first.memory_used_mb) == ("GPU-0", "NVIDIA H100", 80_000, 1)
    assert (first.ecc_errors, first.remap_pending) == (3, True)
    assert (second.ecc_errors, second.remap_pending) == (None, None)
    assert first.throttled == ("hardware thermal slowdown",)


def test_host_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert read_gpus() == ((), "")


def test_gpu_that_is_lost_is_an_error(driver: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: int) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lost)
    with pytest.raises(pynvml.NVMLError):
        read_gpus()
