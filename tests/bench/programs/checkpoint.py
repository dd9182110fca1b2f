"""Step time lost to a checkpoint: the same loop without one, with ddptrain's, and with a synchronous torch.save.

The model and Adam's moments are 500 MB together. A step is what a rank does between two checkpoints that follow each
other fast: matrix products that keep a core busy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

_STEPS_BETWEEN = 40


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, between: Callable[[int], None]) -> float:
    """Seconds that `number` steps take, with a call after each."""
    inputs = torch.randn(256, 1024)
    busy = torch.randn(512, 512)
    began = time.perf_counter()
    for step in range(number):
        for _ in range(20):
            busy = torch.tanh(busy @ busy * 1e-3)
        optimizer.zero_grad()
        loss = model[0](inputs).pow(2).mean()  # type: ignore[index]
        loss.backward()
        between(step)
    return time.perf_counter() - began


def workload(ctx: Any, out: str, mega_bytes: int, checkpoints: int, kind: str) -> None:
    """Trains with `checkpoints` of them; rank 0 writes the seconds lost to each to `out`."""
    torch.manual_seed(0)
    n_layers = max(1, mega_bytes * 1_000_000 // (3 * 4 * 1024 * 1024))  # weights and two moments, of 4 bytes
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(n_layers)))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    folder = Path(out).parent

    def save(step: int) -> None:
        if step % _STEPS_BETWEEN != 0:
            return
        if kind == "ours":
            ctx.checkpoint(model=model, optimizer=optimizer, step=step)
        elif kind == "torch" and ctx.rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{step}.pt")
            (folder / f"{step - _STEPS_BETWEEN}.pt").unlink(missing_ok=True)

    _steps(model, optimizer, _STEPS_BETWEEN, lambda step: None)
    _steps(model, optimizer, _STEPS_BETWEEN, save)  # the first one allocates memory, or makes the page cache grow
    number = checkpoints * _STEPS_BETWEEN
    plain = _steps(model, optimizer, number, lambda step: None)
    with_saves = _steps(model, optimizer, number, save)
    if ctx.rank == 0:
        Path(out).write_text(json.dumps({"lost_s": (with_saves - plain) / checkpoints, "step_s": plain / number}))
