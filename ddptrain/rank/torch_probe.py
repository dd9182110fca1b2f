"""The process that tests torch on this machine for `ddptrain doctor`. Writes JSON to stdout."""

from __future__ import annotations

import json
from typing import Any

from ddptrain.errors import one_line


def main() -> None:
    """Print the result of probe()."""
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
        _reduce_with_gloo()
    except Exception as error:  # gloo raises RuntimeError, torch without gloo other errors
        problems["gloo"] = one_line(error)
    return result


def _reduce_with_gloo() -> None:
    import torch
    from torch import distributed
    from torch._C._distributed_c10d import HashStore

    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        distributed.all_reduce(torch.ones(1))
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
