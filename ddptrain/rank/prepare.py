"""What ctx.prepare and its like do; each is optional, and plain torch code is as good."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
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
