"""Many lines printed at once by each rank: the same function under ddptrain and torchrun."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist


def burst(folder: str, lines: int) -> None:
    """Wait until the machine is idle, record the start time, and print `lines` numbered lines."""
    rank = dist.get_rank()
    dist.barrier()
    time.sleep(1.0)
    Path(folder, f"begin-{rank}").write_text(str(time.time()))
    for number in range(lines):
        print(f"{number:06d} of rank {rank}")


def workload(ctx: Any, folder: str, lines: int) -> None:
    """The function that ddptrain calls in each rank."""
    burst(folder, lines)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    burst(**json.loads(sys.argv[1]))
    sys.stdout.flush()
    dist.destroy_process_group()
