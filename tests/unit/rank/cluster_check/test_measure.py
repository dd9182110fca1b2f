"""Measurements give plausible numbers, and a peer that does not come is an error and no hang."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
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
