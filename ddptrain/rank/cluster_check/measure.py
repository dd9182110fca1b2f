"""Measurements of the cluster check: matrix products, copies to the GPU, and all-reduce."""

from __future__ import annotations

import datetime as dt
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

_CPU_SIZE, _GPU_SIZE = 768, 8192  # of the square matrices
_COPY_BYTES = 256 << 20
_LATENCY_BYTES = 8
_WARM_UP, _LATENCY_COUNT, _MAX_COUNT = 3, 50, 50
_MIN_COUNT = 6  # operations: with fewer, one pause would determine the result
_FIRST_BYTES = 256 << 10
_GROWTH = 4
_GROWTH_SHARE = 0.5  # larger tensors are tried while one operation takes less than this share of the time


def gemm_gflops(device: torch.device, seconds: float) -> float:
    """Return the GFLOP/s of matrix products (bfloat16 on a GPU, float32 on the CPU), measured for `seconds`."""
    on_gpu = device.type == "cuda"
    size, kind = (_GPU_SIZE, torch.bfloat16) if on_gpu else (_CPU_SIZE, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    return 2.0 * size**3 / _duration_s(multiply, device, seconds) / 1e9


def copy_gb_s(device: torch.device, seconds: float) -> float:
    """Return the GB/s of copies from pinned memory of the host to the GPU, measured for `seconds`."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return _COPY_BYTES / _duration_s(copy, device, seconds) / 1e9


def _duration_s(work: Callable[[], None], device: torch.device, seconds: float) -> float:
    """Return the typical duration of one call; the first call is not counted."""
    work()
    _finish(device)
    durations: list[float] = []
    deadline = time.monotonic() + seconds
    while not durations or time.monotonic() < deadline:
        began = time.perf_counter()
        work()
        _finish(device)
        durations.append(time.perf_counter() - began)
    return _typical_s(durations)


def _typical_s(durations: list[float]) -> float:
    """Return the median of the faster half: other programs on the hosts disturb some of the operations."""
    return statistics.median(sorted(durations)[: (len(durations) + 1) // 2])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Group:
    """A separate process group for one measurement, so that a failure does not affect other measurements.

    Raises RuntimeError (also in `measure`) if the ranks don't connect, or an operation takes longer than `timeout_s`.
    """

    def __init__(
        self, store: Store, name: str, rank: int, size: int, timeout_s: float, device: torch.device, *, nccl: bool
    ) -> None:
        timeout = dt.timedelta(seconds=timeout_s)
        group_store = PrefixStore(name, store)
        group_store.set_timeout(timeout)
        self.size = size
        self.device = device if nccl else torch.device("cpu")
        if nccl:
            self._group: Any = dist.ProcessGroupNCCL(group_store, rank, size, timeout)  # type: ignore[arg-type]  # the stub lacks this form
        else:
            self._group = dist.ProcessGroupGloo(group_store, rank, size, timeout)

    def measure(self, seconds: float, most_bytes: int) -> dict[str, float]:
        """Return `gb_s`, the bus bandwidth of an all-reduce (as nccl-tests define it), and `latency_us`.

        All ranks do the same number of operations, because they agree on the slowest rank's time before each series.
        """
        small = self._zeros(_LATENCY_BYTES)
        for _ in range(_WARM_UP):
            self._reduce_s(small)
        alone_s = self._agreed(self._reduce_s(small))
        count = self._count(seconds / 4, alone_s, _LATENCY_COUNT)
        latency_s = statistics.median(self._reduce_s(small) for _ in range(count))
        size, once_s = self._largest(seconds, most_bytes)
        large = self._zeros(size)
        count = self._count(seconds, once_s, _MAX_COUNT)
        typical_s = self._agreed(_typical_s([self._reduce_s(large) for _ in range(count)]))
        bus_bytes = size * 2 * (self.size - 1) / self.size
        return {"gb_s": bus_bytes / typical_s / 1e9, "latency_us": latency_s * 1e6, "bytes": float(size)}

    def close(self) -> None:
        """Free the memory of the GPU that NCCL holds for the group."""
        if self.device.type == "cuda":
            self._group.shutdown()

    def _largest(self, seconds: float, most_bytes: int) -> tuple[int, float]:
        """Return the largest size in bytes for which several operations fit into the time, and the duration of one."""
        size = _FIRST_BYTES
        self._reduce_s(self._zeros(size))
        while True:
            once_s = self._agreed(min(self._reduce_s(self._zeros(size)) for _ in range(2)))
            if once_s > seconds * _GROWTH_SHARE / _GROWTH or size * _GROWTH > most_bytes:
                return size, once_s
            size *= _GROWTH

    def _count(self, seconds: float, once_s: float, most: int) -> int:
        return max(_MIN_COUNT, min(most, int(seconds / max(once_s, 1e-6))))

    def _agreed(self, seconds: float) -> float:
        """Return the largest of the values of all ranks."""
        value = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._group.allreduce([value], options).wait()
        return float(value.item())

    def _zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size // 4, dtype=torch.float32, device=self.device)

    def _reduce_s(self, tensor: torch.Tensor) -> float:
        began = time.perf_counter()
        self._group.allreduce([tensor], dist.AllreduceOptions()).wait()
        _finish(self.device)
        return time.perf_counter() - began
