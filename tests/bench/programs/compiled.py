"""The first step of a compiled model: of the first attempt, which is then killed, and after the restart."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


def workload(ctx: Any, out: str) -> None:
    """Writes the seconds of the first step of each attempt to `out`; the first attempt ends with SIGKILL."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0)
    model = ctx.prepare(nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(128, 10)))
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(16, 32, 128)
    began = time.perf_counter()
    loss = model(inputs).pow(2).mean()
    loss.backward()
    optimizer.step()
    loss.item()
    took_s = time.perf_counter() - began
    ctx.mean(1.0)  # all ranks have compiled
    path = Path(out)
    earlier: list[float] = json.loads(path.read_text()) if path.exists() else []
    if ctx.rank == 0:
        path.write_text(json.dumps([*earlier, took_s]))
        if not earlier:
            os.kill(os.getpid(), signal.SIGKILL)
    ctx.mean(1.0)
