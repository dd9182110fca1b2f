"""The host of a worker: its facts, its metrics and its memory."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import TypeAdapter

from ddptrain.protocol import news
from ddptrain.protocol.news import HOST_METRICS, MAX_SAMPLED_RANKS, RANK_METRICS
from ddptrain.worker.host_facts import GpuFacts, HostFacts, host_facts, read_gpus
from ddptrain.worker.system_metrics import (
    GpuReader,
    MemoryWatch,
    Rates,
    SampledRank,
    SystemSampler,
    cpu_seconds,
    members,
    rank_use,
)

# --- Facts of a host ---


def test_facts_of_this_host_survive_the_way_to_the_driver(tmp_path: Path) -> None:
    facts = host_facts(tmp_path)
    assert facts.cores >= 1 and facts.memory_mb > 0 and facts.open_files > 0 and facts.scratch_mb > 0
    assert TypeAdapter(HostFacts).validate_json(json.dumps(dataclasses.asdict(facts))) == facts


def test_folder_that_is_missing_is_a_problem_and_not_an_error(tmp_path: Path) -> None:
    (problem,) = host_facts(tmp_path / "missing").problems
    assert problem.endswith("No such file or directory")


# --- An out-of-memory kill is distinguished from any other SIGKILL by the counters of control groups ---


@pytest.mark.parametrize(
    ("limit", "kills", "reason"),
    [
        (str(2 << 30), 4, "out of memory (the memory limit of 2.0 GiB of its control group)"),
        ("max", 4, "out of memory (the host's)"),
        (str(2 << 30), 3, ""),  # those were others, before
    ],
)
def test_kill_that_the_control_group_has_counted_is_explained(
    tmp_path: Path, limit: str, kills: int, reason: str
) -> None:
    """The limit may be that of a group above the one that counts."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cgroup").write_text("4:cpu:/x\n0::/jobs/a\n")
    (root / "jobs" / "a").mkdir(parents=True)
    (root / "jobs" / "memory.events").write_text("oom 9\noom_kill 3\n")
    (root / "jobs" / "memory.max").write_text(f"{limit}\n")
    watch = MemoryWatch(7, root, proc)
    (root / "jobs" / "memory.events").write_text(f"oom 9\noom_kill {kills}\n")
    assert watch.explain_kill() == reason


def test_machine_without_counters_is_no_error(tmp_path: Path) -> None:
    assert MemoryWatch(7, tmp_path / "none", tmp_path / "none").explain_kill() == ""


# --- The use of a host, its ranks and GPUs: real processes, and an NVML with known answers ---


class Nvml:  # with the names of NVIDIA's module
    """NVML with one GPU; a MIG instance has no utilization, and is asked for it once."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        """An error of NVML."""

    class NVMLError_NotSupported(NVMLError):  # noqa: N801
        """This GPU can't measure it."""

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        if index:
            raise self.NVMLError
        return "GPU"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802
        return name

    def nvmlDeviceGetUtilizationRates(self, gpu: str) -> Any:  # noqa: N802
        if gpu.startswith("MIG"):
            raise self.NVMLError_NotSupported
        return SimpleNamespace(gpu=93)

    def nvmlInit(self) -> None:  # noqa: N802
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=6, total=8),
            "nvmlDeviceGetPowerUsage": 350_500,
            "nvmlDeviceGetTemperature": 71,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
        }
        return lambda *_: answers[name]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """In the place of nvidia-ml-py."""
    module = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", cast(ModuleType, module))
    return module


@pytest.mark.parametrize("name", ["0", "GPU-abc"])
def test_metrics_of_a_gpu(nvml: Nvml, name: str) -> None:
    assert GpuReader().read(name) == {
        "gpu_percent": 93,
        "gpu_memory_bytes": 6,
        "gpu_memory_total_bytes": 8,
        "gpu_power_w": 350.5,
        "gpu_temperature_c": 71,
        "gpu_throttle": 4,
    }


def test_facts_of_a_gpu_have_no_power_limit_among_its_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=80_000_000_000, used=100_000_000)
    answers: dict[str, Any] = {
        "Init": None,
        "Shutdown": None,
        "SystemGetDriverVersion": "580.1",
        "DeviceGetCount": 1,
        "DeviceGetHandleByIndex": "GPU",
        "DeviceGetName": "H100",
        "DeviceGetMemoryInfo": memory,
        "DeviceGetTotalEccErrors": 3,
        "DeviceGetCurrentClocksThrottleReasons": 0x24,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(f"pynvml.nvml{name}", lambda *_, answer=answer: answer)
    facts = GpuFacts(0, "H100", 80_000, 100, ecc_errors=3, throttled=("software thermal slowdown",))
    assert read_gpus() == ((facts,), "580.1")


def test_what_a_gpu_cannot_measure_is_left_out(nvml: Nvml) -> None:
    reader = GpuReader()
    assert "gpu_percent" not in reader.read("MIG-1") and "gpu_power_w" in reader.read("MIG-1")
    assert "gpu_percent" in reader.read("0") and reader.read("1") == {}


@pytest.mark.gpu
def test_metrics_of_a_real_gpu() -> None:
    found = GpuReader().read("0")
    assert found["gpu_memory_total_bytes"] > found["gpu_memory_bytes"] > 0
    assert 0 < found["gpu_temperature_c"] < 120
    assert found.keys() <= RANK_METRICS.keys()


def test_rank_and_its_children_are_measured_together() -> None:
    code = "import subprocess, sys; print(1, flush=True); subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, process_group=0) as leader:
        try:
            assert leader.stdout is not None
            leader.stdout.readline()
            deadline = time.monotonic() + 60
            rates = Rates()
            use: dict[str, float] = {}
            while use.get("processes") != 2 or use.get("cpu_percent", 0) < 5:
                assert time.monotonic() < deadline
                time.sleep(0.2)
                use = rank_use(members([leader.pid])[leader.pid], rates, time.monotonic())
            assert use["rss_bytes"] > 1_000_000 and cpu_seconds(members([leader.pid])[leader.pid]) > 0
        finally:
            os.killpg(leader.pid, 9)


def test_counter_of_a_child_that_has_ended_does_not_count_backwards() -> None:
    rates = Rates()
    now = time.monotonic()
    assert rates.of({"a": 5.0, "b": 0.0}, now + 1) == {}
    assert rates.of({"a": 1.0, "b": 10.0, "c": 3.0}, now + 3) == {"a": 0.0, "b": 5.0}


def test_ranks_of_a_host_are_measured_together() -> None:
    ranks = [SampledRank(number, os.getpgid(0), None) for number in range(3)]
    sampler = SystemSampler(lambda: ranks, 1.0)
    list(sampler.measure())
    (second,) = sampler.measure()
    assert second.ranks.keys() == {"0", "1", "2"}
    assert {"cpu_percent", "memory_bytes", "network_bytes_s"} <= second.use.keys() <= HOST_METRICS.keys()
    assert {"cpu_percent", "rss_bytes", "processes"} == second.ranks["0"].keys() <= RANK_METRICS.keys()
    message = news.News(1, sample=second, worker="w")
    assert news.decode({**news.encode(message), "worker": "w"}) == message


def test_many_ranks_are_split_into_samples_of_limited_size() -> None:
    ranks = [SampledRank(number, os.getpgid(0), None) for number in range(MAX_SAMPLED_RANKS + 1)]
    assert [len(sample.ranks) for sample in SystemSampler(lambda: ranks, 1.0).measure()] == [MAX_SAMPLED_RANKS, 1]


def test_host_without_a_running_rank_has_no_sample() -> None:
    assert list(SystemSampler(lambda: [SampledRank(0, 1 << 30, None)], 1.0).measure()) == []


def test_a_measurement_that_fails_is_reported_once() -> None:
    asked: queue.SimpleQueue[None] = queue.SimpleQueue()

    def broken() -> list[SampledRank]:
        asked.put(None)
        raise OSError("no /proc")

    sampler = SystemSampler(broken, 0.01)
    sampler.start()
    for _ in range(3):
        asked.get(timeout=20)
    sampler.stop()
    assert (sampler.errors.get(timeout=20), sampler.errors.empty()) == ("OSError: no /proc", True)
