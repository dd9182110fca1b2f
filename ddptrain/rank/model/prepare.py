"""ctx.prepare (optional): device, precision, compilation, memory format and DDP of a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddptrain.rank.model.sharding import DDP, checked_strategy, checkpoint_activations, shard_model, wrap_forward

_prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the models that were given, and those that were returned
_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def prepare_model(
    model: nn.Module,
    device: torch.device,
    settings: Mapping[str, Any],
    use_compile_cache: Callable[[], None] = lambda: None,
    **ddp: Any,
) -> nn.Module:
    """Move the model to the device, apply `settings` (see config), and wrap it in DDP or shard it.

    `use_compile_cache` is called before torch.compile. `ddp` are arguments of DistributedDataParallel, which does
    not accept a model without trainable parameters: such a model is returned without DDP. Raises ValueError for an
    unknown precision or strategy (see sharding.py), and for a model that is in DDP or has been prepared before.
    """
    _require_unprepared(model)
    precision = settings.get("precision", "fp32")
    if precision not in _PRECISIONS:
        raise ValueError(f"precision is {precision!r}: choose one of {', '.join(_PRECISIONS)}")
    sharded = checked_strategy(settings, ddp) != DDP
    if sharded and precision == "fp16":
        raise ValueError("precision fp16 needs strategy ddp: choose bf16 or fp32 for a model that ranks share")
    if not sharded:  # a sharded model is moved layer by layer, because it may be too large for the device
        model = model.to(device)
    checkpoint_activations(model, settings.get("activation_checkpointing") or ())
    if settings.get("channels_last"):
        model = model.to(memory_format=torch.channels_last)
    dtype = _PRECISIONS[precision]
    if sharded:
        model = shard_model(model, device, settings, dtype)
    elif dtype is not None:
        wrap_forward(model, torch.autocast(device.type, dtype=dtype))
    if settings.get("compile"):
        use_compile_cache()
        model.compile()
    _prepared.add(model)
    if sharded or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    ids = [device] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=ids, **ddp)
    _prepared.add(wrapped)
    return wrapped


def _require_unprepared(model: nn.Module) -> None:
    if model in _prepared:
        raise ValueError("ctx.prepare was called with this model before: call it once, and use the model it returned")
    if isinstance(model, DistributedDataParallel):
        raise ValueError("ctx.prepare was given a model in DistributedDataParallel: give it the model inside (.module)")
