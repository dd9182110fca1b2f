"""Step time lost to a checkpoint: a loop without one, with ours, with torch.save, and with DCP's async_save.

A step is some matrix products, which keep a core busy.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save

_BETWEEN_S, _MB_PER_S = 4.0, 200  # a checkpoint is written before the next one begins


def _took(step: Callable[[], None], number: int, after: Callable[[int], None]) -> list[float]:
    """Seconds of each of `number` steps, with the call after it."""
    times = []
    for index in range(number):
        began = time.perf_counter()
        step()
        after(index)
        times.append(time.perf_counter() - began)
    return times


def _excess(times: list[float], usual: float) -> float:
    """Seconds beyond what as many usual steps take; of each but the first, at most one usual step.

    Steps are less than twice as slow while a checkpoint is written; longer pauses are those of the machine.
    """
    return times[0] - usual + sum(min(each - usual, usual) for each in times[1:])


def _saver(ctx: Any, model: nn.Module, optimizer: torch.optim.Optimizer, out: Path, kind: str) -> Callable[[int], None]:
    """The function that saves a checkpoint, of a step, in this way. Of the peers' checkpoints the last two are kept."""
    pending: list[Any] = []  # DCP's last checkpoint
    number = itertools.count()

    def with_dcp(_: int) -> None:
        weights, moments = get_state_dict(model, optimizer)
        for earlier in pending:
            earlier.result()
        folder = out.with_suffix(f".{next(number) % 2}.dcp")
        pending[:] = [async_save({"model": weights, "optimizer": moments}, checkpoint_id=str(folder), no_dist=True)]

    def with_torch(_: int) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, out.with_suffix(f".{next(number) % 2}.pt"))

    def with_ours(step: int) -> None:
        ctx.checkpoint(model=model, optimizer=optimizer, step=step)

    return {"ours": with_ours, "torch": with_torch, "dcp": with_dcp}[kind]


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

    save_now = _saver(ctx, model, optimizer, Path(out), kind)
    calls: list[float] = []  # seconds of each call that saves

    def save(number: int) -> None:
        if number == 0:
            began = time.perf_counter()
            save_now(len(calls))
            calls.append(time.perf_counter() - began)

    usual = statistics.median(_took(step, 100, lambda _: None))
    between = max(10, round(max(_BETWEEN_S, mega_bytes / _MB_PER_S) / usual))
    _took(step, between, save)  # the first allocates memory, and makes the page cache grow
    pairs = [(_took(step, between, lambda _: None), _took(step, between, save)) for _ in range(checkpoints)]
    usual = statistics.median(itertools.chain.from_iterable(plain for plain, _ in pairs))
    lost = [_excess(saved, usual) - _excess(plain, usual) for plain, saved in pairs]
    noise = [_excess(plain, usual) for plain, _ in pairs]
    figures = {
        "lost_s": statistics.median(lost),
        "noise_s": statistics.median(noise),
        "call_s": statistics.median(calls[1:]),
    }
    Path(out).write_text(json.dumps(figures))
