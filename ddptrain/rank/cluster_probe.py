"""What `ddptrain doctor --cluster` runs on every slot: one matrix product, and one all-reduce of all ranks."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext

_CPU_SIZE, _GPU_SIZE = 1024, 8192  # of the square matrices
_REPEATS = 5
_ALL_REDUCE_BYTES = 16 * 2**20


def measure(ctx: RankContext) -> list[dict[str, Any]] | None:
    """Return each rank's host, device, GFLOP/s, and GB/s of the all-reduce (bus bandwidth); on rank 0 only."""
    size = _GPU_SIZE if ctx.device.type == "cuda" else _CPU_SIZE
    matrix = torch.ones(size, size, device=ctx.device, dtype=torch.bfloat16 if size == _GPU_SIZE else torch.float32)
    product_s = _shortest(ctx.device, lambda: matrix @ matrix)
    numbers = torch.zeros(_ALL_REDUCE_BYTES // 4, device=ctx.device)
    reduce_s = _shortest(ctx.device, lambda: dist.all_reduce(numbers))
    bus_bytes = 2 * (ctx.world_size - 1) / ctx.world_size * _ALL_REDUCE_BYTES
    mine = {
        "host": socket.gethostname(),
        "rank": ctx.rank,
        "device": torch.cuda.get_device_name(ctx.device) if ctx.device.type == "cuda" else "cpu",
        "gflops": 2 * size**3 / product_s / 1e9,
        "all_reduce_gb_s": bus_bytes / reduce_s / 1e9,
    }
    found: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(found, mine)
    return found if ctx.rank == 0 else None


def _shortest(device: torch.device, work: Any) -> float:
    """Return the shortest of some durations of `work`, in seconds; other processes only make it longer."""
    durations = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - began)
    return max(min(durations), 1e-9)
