"""What ctx.prepare and its like do; each is optional, and plain torch code is as good."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}


def prepared(model: nn.Module, device: torch.device, settings: Mapping[str, Any], **ddp: Any) -> nn.Module:
    """The model on its device, as `settings` (precision, compile, channels_last) say, and wrapped in DDP.

    A model without parameters that learn is not wrapped: DDP refuses it. Raises ValueError for another precision.
    """
    precision = settings.get("precision", "fp32")
    if precision not in _PRECISIONS:
        raise ValueError(f"precision is {precision!r}: choose one of {', '.join(_PRECISIONS)}")
    model = model.to(device)
    if settings.get("channels_last"):
        model = model.to(memory_format=torch.channels_last)
    if (dtype := _PRECISIONS[precision]) is not None:
        # In place, so that the names of the weights stay.
        model.forward = torch.autocast(device.type, dtype=dtype)(model.forward)
    if settings.get("compile"):
        model.compile()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, **ddp)


def mean(value: float | torch.Tensor, weight: float, device: torch.device) -> float:
    """The mean over all ranks, each of which counts `weight`; NaN where all weights are 0."""
    number = value.detach().double().mean().item() if isinstance(value, torch.Tensor) else float(value)
    # MPS and others have no double; a sum of float64 on the CPU goes through gloo alone.
    sums = torch.tensor([number * weight, weight], dtype=torch.float64, device=device)
    distributed.all_reduce(sums)
    total, weights = sums.tolist()
    return total / weights if weights else float("nan")


def all_finite(value: float | torch.Tensor, device: torch.device) -> bool:
    """Whether every number of every rank is finite; the same answer on all ranks."""
    tensor = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
    flag = torch.isfinite(tensor).all().to(device=device, dtype=torch.int32)
    distributed.all_reduce(flag, op=distributed.ReduceOp.MIN)
    return bool(flag.item())


@contextlib.contextmanager
def rank_zero_first(rank: int) -> Iterator[None]:
    """Rank 0 runs the block, then all others do; an error of rank 0 ends the gang, so nobody waits for ever."""
    if rank != 0:
        distributed.barrier()
    yield
    if rank == 0:
        distributed.barrier()
