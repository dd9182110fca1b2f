"""The state of a GPU, from an NVML with known answers."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.protocol.system_metrics import RANK_METRICS
from ddptrain.worker.system import gpu_metrics
from ddptrain.worker.system.gpu_metrics import GpuReader


class Nvml:  # with the names of NVIDIA's module
    """NVML with one GPU; a MIG instance has no utilization, and is asked for it once."""

    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1

    class NVMLError(Exception):
        """An error of NVML."""

    class NVMLError_NotSupported(NVMLError):  # noqa: N801
        """This GPU can't measure it."""

    NVMLError_FunctionNotFound = NVMLError_NoPermission = NVMLError_NotSupported

    def __init__(self) -> None:
        self.refused = 0

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        if index:
            raise self.NVMLError
        return "GPU"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802
        return name

    def nvmlDeviceGetUtilizationRates(self, gpu: str) -> Any:  # noqa: N802
        if gpu.startswith("MIG"):
            self.refused += 1
            raise self.NVMLError_NotSupported
        return SimpleNamespace(gpu=93)

    def nvmlDeviceGetPcieThroughput(self, gpu: str, counter: int) -> int:  # noqa: N802
        return 100 + counter

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=6, total=8),
            "nvmlDeviceGetPowerUsage": 350_500,
            "nvmlDeviceGetTemperature": 71,
            "nvmlDeviceGetClockInfo": 1755,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
            "nvmlDeviceGetTotalEccErrors": 2,
            "nvmlDeviceGetComputeRunningProcesses": [1, 2],
        }
        return lambda *_: answers[name]


def test_metrics_of_a_gpu() -> None:
    assert GpuReader(Nvml()).read("0") == {
        "gpu_percent": 93,
        "gpu_memory_bytes": 6,
        "gpu_memory_total_bytes": 8,
        "gpu_power_w": 350.5,
        "gpu_temperature_c": 71,
        "gpu_clock_mhz": 1755,
        "gpu_clock_max_mhz": 1980,
        "gpu_throttle": 4,
        "gpu_ecc_errors": 2,
        "gpu_processes": 2,
        "gpu_pcie_receive_bytes_s": 101_000,
        "gpu_pcie_send_bytes_s": 100_000,
    }


def test_every_metric_of_a_gpu_is_a_known_name() -> None:
    assert GpuReader(Nvml()).read("0").keys() == {name for name in RANK_METRICS if name.startswith("gpu_")}


def test_what_a_gpu_cannot_measure_is_asked_for_once() -> None:
    nvml = Nvml()
    reader = GpuReader(nvml)
    for _ in range(3):
        assert "gpu_percent" not in reader.read("MIG-1")
    assert nvml.refused == 1
    assert "gpu_percent" in reader.read("0")


def test_unknown_gpu_and_missing_driver_have_no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GpuReader(Nvml()).read("3") == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # a worker that others started may lack nvidia-ml-py
    assert GpuReader().read("0") == {}


@pytest.mark.gpu
def test_metrics_of_a_real_gpu() -> None:
    found = GpuReader().read("0")
    assert found["gpu_memory_total_bytes"] > found["gpu_memory_bytes"] > 0
    assert 0 < found["gpu_temperature_c"] < 120
    assert found.keys() <= RANK_METRICS.keys()


@pytest.mark.parametrize(("name", "percent"), [("0", 93), ("GPU-abc", 93), ("1", None), ("MIG-abc", None)])
def test_use_is_asked_by_index_or_uuid(name: str, percent: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_metrics, "_reader", GpuReader(Nvml()))
    assert gpu_metrics.gpu_percent(name) == percent
