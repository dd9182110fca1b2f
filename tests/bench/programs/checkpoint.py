"""Step time lost to a checkpoint: the same loop without one, with ddptrain's, and with a synchronous torch.save.

The model and Adam's moments are 500 MB together. A step is some
matrix products, which keep a core busy.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

_BETWEEN_S = 4.0  # more than the writing takes


def _took(step: Callable[[], None], number: int, after: Callable[[int], None]) -> list[float]:
    """Seconds of each of `number` steps, with the call after it."""
    times = []
    for index in range(number):
        began = time.perf_counter()
        step()
        after(index)
        times.append(time.perf_counter() - began)
    return times


def _excess(times: list[float]) -> float:
    """Seconds beyond what as many usual steps take."""
    return sum(times) - len(times) * statistics.median(times)


def workload(ctx: Any, out: str, mega_bytes: int, checkpoints: int, kind: str) -> None:
    """Trains with `checkpoints` of them; writes the seconds lost to each to `out`."""
    torch.manual_seed(0)
    n_layers = max(1, mega_bytes * 1_000_000 // (3 * 4 * 1024 * 1024))  # weights and two moments, of 4 bytes
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(n_layers)))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    inputs, busy = torch.randn(64, 1024), torch.randn(384, 384)

    def step() -> None:
        optimizer.zero_grad()
        model[0](inputs).pow(2).mean().backward()
        for _ in range(4):
            torch.tanh(busy @ busy * 1e-3)

    def save(number: int) -> None:
        if number % between != 0:
            return
        if kind == "ours":
            ctx.checkpoint(model=model, optimizer=optimizer, step=number)
        else:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, Path(out).with_suffix(f".{number // between % 2}.pt"))

    times = _took(step, 100, lambda _: None)
    between = max(10, round(_BETWEEN_S / statistics.median(times)))
    _took(step, between, save)  # the first allocates memory, and makes the page cache grow
    plain = _excess(_took(step, checkpoints * between, lambda _: None))
    lost_s = (_excess(_took(step, checkpoints * between, save)) - plain) / checkpoints
    Path(out).write_text(json.dumps({"lost_s": lost_s, "noise_s": plain / checkpoints}))
