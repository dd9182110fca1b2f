"""What `ddptrain doctor` runs: a process that tests torch on this machine, and a workload that measures a cluster."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddptrain.errors import one_line

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext

_CPU_SIZE, _GPU_SIZE = 1024, 8192  # of the square matrices
_REPEATS = 5
_ALL_REDUCE_BYTES = 16 * 2**20


def main() -> None:
    """Write the result of probe() to stdout, as JSON."""
    print(json.dumps(probe()), flush=True)


def probe() -> dict[str, Any]:
    """Return versions and devices of torch; `problems` has an error message for each part that fails."""
    import torch

    problems: dict[str, str] = {}
    result: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "problems": problems}
    try:
        import torchvision

        result["torchvision"] = torchvision.__version__
        torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except Exception as error:  # with another version of torch it raises arbitrary errors
        problems["torchvision"] = one_line(error)
    result["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    result["nccl"] = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    try:
        from torch.distributed import HashStore  # type: ignore[attr-defined]

        torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        torch.distributed.all_reduce(torch.ones(1))
        torch.distributed.destroy_process_group()
    except Exception as error:  # gloo raises RuntimeError, torch without gloo other errors
        problems["gloo"] = one_line(error)
    return result


def measure(ctx: RankContext) -> list[dict[str, Any]] | None:
    """Return each rank's host, device, GFLOP/s, and GB/s of the all-reduce (bus bandwidth); on rank 0 only."""
    import torch
    import torch.distributed as dist

    def shortest(work: Callable[[], object]) -> float:
        """Return the shortest of some durations, in seconds; other processes only make it longer."""
        durations = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            work()
            if ctx.device.type == "cuda":
                torch.cuda.synchronize(ctx.device)
            durations.append(time.perf_counter() - began)
        return max(min(durations), 1e-9)

    size = _GPU_SIZE if ctx.device.type == "cuda" else _CPU_SIZE
    matrix = torch.ones(size, size, device=ctx.device, dtype=torch.bfloat16 if size == _GPU_SIZE else torch.float32)
    product_s = shortest(lambda: matrix @ matrix)
    numbers = torch.zeros(_ALL_REDUCE_BYTES // 4, device=ctx.device)
    reduce_s = shortest(lambda: dist.all_reduce(numbers))
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


if __name__ == "__main__":
    main()
