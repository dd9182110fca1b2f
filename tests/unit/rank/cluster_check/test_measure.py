"""Measurements give plausible numbers, and a peer that does not come is an error and no hang."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

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


@pytest.mark.gpu
def test_gpu_is_measured() -> None:
    device = torch.device("cuda", 0)
    assert gemm_gflops(device, 0.2) > 1_000
    assert copy_gb_s(device, 0.1) > 0.5
