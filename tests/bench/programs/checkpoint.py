"""Step time lost to a checkpoint: a loop without one, with ours, with torch.save, and with DCP's async_save.

A step is some matrix products, which keep a core busy.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

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

    pending: list[Future[Any]] = []  # DCP's last checkpoint

    calls: list[float] = []  # seconds of each call that saves

    def save(number: int) -> None:
        if number % between == 0:
            began = time.perf_counter()
            save_now(number)
            calls.append(time.perf_counter() - began)

    def save_now(number: int) -> None:
        file = Path(out).with_suffix(f".{number // between % 2}.pt")  # the last two are kept
        if kind == "ours":
            ctx.checkpoint(model=model, optimizer=optimizer, step=number)
        elif kind == "dcp":
            weights, moments = get_state_dict(model, optimizer)
            for earlier in pending:
                earlier.result()
            state = {"model": weights, "optimizer": moments}
            pending[:] = [dcp.async_save(state, checkpoint_id=str(file), no_dist=True)]
        else:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)

    times = _took(step, 100, lambda _: None)
    between = max(10, round(_BETWEEN_S / statistics.median(times)))
    _took(step, between, save)  # the first allocates memory, and makes the page cache grow
    plain = _excess(_took(step, checkpoints * between, lambda _: None))
    lost_s = (_excess(_took(step, checkpoints * between, save)) - plain) / checkpoints
    for last in pending:
        last.result()
    Path(out).write_text(
        json.dumps({"lost_s": lost_s, "noise_s": plain / checkpoints, "call_s": statistics.mean(calls[1:])})
    )
