"""GPUs and cores of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from ddptrain import gpus
from ddptrain.errors import ClusterError
from ddptrain.worker.host_facts import read_gpus

# --- Which signs of GPUs make an empty list an error, and how many cores a process may use ---


def touched(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


@pytest.mark.parametrize("names", [("dev/nvidia0", "dev/nvidiactl"), ("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1")])
def test_device_without_a_list_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    monkeypatch.setattr("ctypes.CDLL", missing_library)
    with pytest.raises(ClusterError, match=r"exists, but the GPUs of .* cluster.gpus to 0"):
        gpus.visible_gpus({}, touched(tmp_path, *names))
    assert gpus.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()


@pytest.mark.parametrize("names", [(), ("dev/nvidiactl", "dev/nvidia-uvm"), ("dev/dxg",)])
def test_machine_without_a_gpu_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    monkeypatch.setattr("ctypes.CDLL", missing_library)
    assert gpus.visible_gpus({}, touched(tmp_path, *names)) == ()


def missing_library(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("chosen", "offered"),
    [
        (None, ("0", "1", "2")),
        ("1", ("1",)),
        ("1, 0", ("1", "0")),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),
        ("NoDevFiles", ()),
        ("GPU-ab,MIG-cd", ("GPU-ab", "MIG-cd")),
    ],
)
def test_users_choice_wins_over_what_is_there(
    chosen: str | None, offered: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    for name, answer in {"nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": 3}.items():
        monkeypatch.setattr(f"pynvml.{name}", lambda answer=answer: answer)
    assert gpus.visible_gpus({} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}) == offered


@pytest.mark.parametrize(("cores", "slots"), [(1, 2), (2, 2), (5, 2), (16, 8)])
def test_machine_without_gpus_has_a_slot_for_every_two_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, slots: int
) -> None:
    monkeypatch.setattr(gpus, "usable_cores", lambda: cores)
    assert gpus.default_slots(()) == slots
    assert gpus.default_slots(("0", "1", "2")) == 3


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system knows no CPU affinity")
class TestCores:
    @pytest.fixture(autouse=True)
    def four_of_128(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.cpu_count", lambda: 128)
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 4, 5, 6})

    @pytest.mark.parametrize(
        ("groups", "limits", "cores"),
        [
            ("0::/", {}, 4),
            ("0::/", {"cpu.max": "max 100000"}, 4),
            ("0::/", {"cpu.max": "150000 100000"}, 2),
            ("0::/a/b", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "300000 100000"}, 1),
            ("0::/a", {"a/cpu.max": "900000 100000"}, 4),
            # Version 1: the mount in a container begins at its own group, whose path is that of the host.
            ("4:cpu,cpuacct:/docker/x", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
            ("4:cpuacct:/", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 4),
            ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ],
    )
    def test_affinity_and_quota_limit_the_cores(
        self, tmp_path: Path, groups: str, limits: dict[str, str], cores: int
    ) -> None:
        for name, text in {
            "proc/self/cgroup": groups,
            **{f"sys/fs/cgroup/{name}": limits[name] for name in limits},
        }.items():
            touched(tmp_path, name)
            (tmp_path / name).write_text(f"{text}\n")
        assert gpus.usable_cores(tmp_path) == cores


# --- GPUs as NVML describes them; the library is a stub here ---


def unsupported(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two GPUs; the second is of a kind without ECC."""
    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlSystemGetDriverVersion": lambda: "580.65",
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=80_000_000_000, used=1_000_000),
        "nvmlDeviceGetName": lambda _: b"NVIDIA H100",
        "nvmlDeviceGetTotalEccErrors": lambda index, *_: 3 if index == 0 else unsupported(),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: (
            pynvml.nvmlClocksEventReasonHwThermalSlowdown | pynvml.nvmlClocksEventReasonGpuIdle
        ),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    return answers


def test_gpus_are_described_and_unsupported_values_are_left_out(driver: dict[str, Any]) -> None:
    (first, second), version = read_gpus()
    assert version == "580.65"
    assert (first.name, first.memory_mb, first.memory_used_mb) == ("NVIDIA H100", 80_000, 1)
    assert (first.ecc_errors, second.ecc_errors) == (3, None)
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
