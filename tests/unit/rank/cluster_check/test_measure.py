"""Measurements give plausible numbers, and a peer that does not come is an error and no hang."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from ddptrain.rank.cluster_check import measure
from ddptrain.rank.cluster_check.measure import Group, copy_gb_s, gemm_gflops

CPU = torch.device("cpu")


def test_two_ranks_agree_on_the_bandwidth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def measured(rank: int) -> dict[str, float]:
        store = FileStore(str(tmp_path / "store"), 2)
        group = Group(store, "pair", rank, 2, 20.0, CPU, nccl=False)
        assert group._zeros(4096).nbytes == 4096
        return group.measure(0.05, 1 << 20)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(measured, range(2))
    assert first["gb_s"] > 0 and first["latency_us"] > 0
    assert first["bytes"] == second["bytes"] >= 256 << 10
    assert first["gb_s"] == second["gb_s"]


def test_peer_that_does_not_come_is_an_error_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    threads = threading.active_count()
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        Group(FileStore(str(tmp_path / "store"), 2), "pair", 0, 2, 0.5, CPU, nccl=False)
    assert time.monotonic() - began < 20.0
    assert threading.active_count() == threads


def test_matrix_products_are_measured() -> None:
    assert gemm_gflops(CPU, 0.01) > 0.01


@pytest.mark.parametrize(
    ("durations", "typical"),
    [([3.0], 3.0), ([1.0, 9.0], 1.0), ([9.0, 1.0, 2.0], 1.5), ([4.0, 1.0, 2.0, 3.0, 9.0], 2.0)],
)
def test_typical_duration_is_the_median_of_the_faster_half(durations: list[float], typical: float) -> None:
    assert measure._typical_s(durations) == typical


def test_matrix_products_are_counted_in_gflops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_duration_s", lambda work, device, seconds: 2 * seconds)
    assert gemm_gflops(CPU, 0.25) == 2 * 768**3 / 0.5 / 1e9


@pytest.mark.parametrize(("seconds", "calls"), [(0.0, 2), (0.99, 2), (1.0, 2), (1.01, 3), (2.0, 3)])
def test_work_is_repeated_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch, seconds: float, calls: int) -> None:
    now, done = [100.0], list[float]()
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr(measure, "time", clock)

    def work() -> None:
        if done:
            now[0] += 1.0
        done.append(now[0])

    assert measure._duration_s(work, CPU, seconds) == 1.0 and len(done) == calls


class Alone(Group):
    """A group of four ranks whose operations take `s_per_mib` for each MiB, and at least 1 ms."""

    def __init__(self, s_per_mib: float) -> None:
        self.size, self.device, self.s_per_mib = 4, CPU, s_per_mib
        self.sizes: list[int] = []

    def _reduce_s(self, tensor: torch.Tensor) -> float:
        self.sizes.append(tensor.nbytes)
        return max(0.001, self.s_per_mib * tensor.nbytes / (1 << 20))

    def _agreed(self, seconds: float) -> float:
        return 2 * seconds  # the slowest rank's


@pytest.mark.parametrize(
    ("s_per_mib", "seconds", "most", "size", "small", "large"),
    [
        # 256 KiB, 1 MiB, 4 MiB: as large as allowed. 50 operations at most of each kind.
        (0.0001, 1.0, 4 << 20, 4 << 20, 54, 50),
        (0.0001, 1.0, (4 << 20) - 4, 1 << 20, 54, 50),
        # An operation on 1 MiB takes 2 x 80 ms, more than an eighth of the time: none four times as large is tried.
        (0.08, 1.0, 1 << 30, 1 << 20, 54, 6),
        # However slow, some are measured.
        (0.08, 0.01, 1 << 30, 256 << 10, 10, 6),
    ],
)
def test_largest_tensor_is_the_one_that_fits_into_the_time(
    s_per_mib: float, seconds: float, most: int, size: int, small: int, large: int
) -> None:
    group = Alone(s_per_mib)
    found = group.measure(seconds, most)
    once_s = max(0.001, s_per_mib * size / (1 << 20))
    assert found == {
        "gb_s": pytest.approx(size * 1.5 / (2 * once_s) / 1e9),
        "latency_us": pytest.approx(1000.0),
        "bytes": float(size),
    }
    ladder = [256 << 10]
    while ladder[-1] < size:
        ladder.append(4 * ladder[-1])
    assert group.sizes == [*[8] * small, 256 << 10, *(each for each in ladder for _ in range(2)), *[size] * large]


@pytest.mark.gpu
def test_gpu_is_measured() -> None:
    device = torch.device("cuda", 0)
    assert gemm_gflops(device, 0.2) > 1_000
    assert copy_gb_s(device, 0.1) > 0.5


def test_copies_to_the_gpu_are_counted_in_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    made: list[tuple[Any, ...]] = []
    copied: list[tuple[Any, ...]] = []

    def empty(size: int, **options: Any) -> Any:
        made.append((size, options))
        return SimpleNamespace(copy_=lambda source, **more: copied.append((source, more)), options=options)

    def duration_s(work: Callable[[], None], where: torch.device, seconds: float) -> float:
        work()
        assert where == device
        return 2 * seconds

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(measure, "_duration_s", duration_s)
    assert copy_gb_s(device, 0.25) == 268_435_456 / 0.5 / 1e9
    kind = torch.uint8
    assert made == [(1 << 28, {"dtype": kind, "pin_memory": True}), (1 << 28, {"dtype": kind, "device": device})]
    ((source, options),) = copied
    assert "pin_memory" in source.options and options == {"non_blocking": True}


def test_work_on_a_gpu_is_over_when_the_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for device in (CPU, torch.device("cuda", 1)):
        measure._finish(device)
    assert waited == [torch.device("cuda", 1)]


@pytest.mark.parametrize("nccl", [True, False])
def test_group_has_a_store_and_a_time_limit_of_its_own(monkeypatch: pytest.MonkeyPatch, nccl: bool) -> None:
    made: list[Any] = []

    class Own:
        def __init__(self, name: str, store: Any) -> None:
            made.append((name, store))

        def set_timeout(self, timeout: dt.timedelta) -> None:
            made.append(timeout.total_seconds())

    def create(kind: str) -> Callable[..., Any]:
        def group(own: Any, rank: int, size: int, timeout: dt.timedelta) -> Any:
            made.append((kind, type(own), rank, size, timeout.total_seconds()))
            return SimpleNamespace(shutdown=lambda: made.append("shut down"))

        return group

    monkeypatch.setattr(measure, "PrefixStore", Own)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", create("nccl"), raising=False)
    monkeypatch.setattr(dist, "ProcessGroupGloo", create("gloo"))
    device = torch.device("cuda", 1)
    store: Any = "store"
    group = Group(store, "pair", 1, 3, 20.0, device, nccl=nccl)
    assert (group.size, group.device) == (3, device if nccl else CPU)
    group.close()
    kind = "nccl" if nccl else "gloo"
    assert made == [("pair", "store"), 20.0, (kind, Own, 1, 3, 20.0), *(["shut down"] if nccl else [])]


def test_ranks_agree_on_the_largest_value_and_operations_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    now = iter([10.0, 12.5])

    class Alone(Group):
        def __init__(self) -> None:
            self.size, self.device = 2, CPU
            self._group = SimpleNamespace(allreduce=self.reduce)

        def reduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
            done.append((tensors[0].tolist(), tensors[0].dtype, options.reduceOp == dist.ReduceOp.MAX))
            tensors[0] += 1.0
            return SimpleNamespace(wait=lambda: done.append("waited"))

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    group = Alone()
    assert group._agreed(0.1) == 1.1
    assert group._reduce_s(group._zeros(8)) == 2.5
    assert done == [([0.1], torch.float64, True), "waited", ([0.0, 0.0], torch.float32, False), "waited"]
