"""Ranks without torch: each takes some MB, so that a thousand fit on one machine. They write events as real ones do.

A rank server whose Python imports this module at its start (see sitecustomize.py in experiments/scale.py) forks them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any


def workload(ctx: Any, folder: str, events_per_s: float, seconds: float) -> None:
    """The name under which ddptrain finds this file; the stand-in below runs in its place."""


def install() -> None:
    """Put stand-ins in the place of the modules with which a rank server imports torch and runs ranks."""
    warmup, lifecycle, torch = (ModuleType(name) for name in ("warmup", "lifecycle", "torch.distributed"))
    warmup.import_everything = _import_what_ranks_need  # type: ignore[attr-defined]
    lifecycle.run_rank = _run_rank  # type: ignore[attr-defined]
    torch.TCPStore = lambda *_, **__: None  # type: ignore[attr-defined]
    sys.modules |= {"ddptrain.rank.warmup": warmup, "ddptrain.rank.lifecycle": lifecycle}
    sys.modules |= {"torch": torch, "torch.distributed": torch}


def _import_what_ranks_need() -> None:
    """Import before the forks, as a real rank server does."""
    from ddptrain.protocol import events, rank_spec

    assert events.__name__ and rank_spec.__name__


def _run_rank(spec: Any, log_fd: int, events_fd: int, commands_fd: int) -> int:
    from ddptrain.protocol import events

    def write(event: events.Event) -> None:
        os.write(events_fd, events.encode(event))

    params = spec.code.params
    write(events.Started(time.time_ns(), os.getpid(), "host"))
    write(events.Entered(time.time_ns()))
    Path(params["folder"], f"step-{spec.rank}").write_text(str(time.time_ns()))
    end = time.monotonic() + params["seconds"]
    step = 0
    while time.monotonic() < end:
        time.sleep(1 / params["events_per_s"])
        step += 1
        write(events.Metrics(time.time_ns(), {"loss": 1.0 / step}, step))
    write(events.Finished(time.time_ns()))
    return 0
