"""Reports what DDP itself measures in some steps: it shows which rank is slow, and how long rank 0 waits for others.

DDP measures its first ten steps, and then one of 100: forward pass, backward pass and gradient exchange; on a GPU with
CUDA events, for which it waits at the beginning of the next forward pass. Here it is one of 20, or one in ten seconds.
A thread reads the newest of these, in longer and longer intervals, so that a step costs nothing more. The events also
show the driver that a rank that prints nothing makes progress.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ddptrain.protocol import events
from ddptrain.rank.emitter import Emitter

_EVERY_STEPS, _EVERY_S = 20, 10.0
_WARM_UP_STEPS = 3  # they allocate memory and compile
_FIRST_PAUSE_S, _MAX_PAUSE_S, _LONGER = 0.2, 5.0, 1.3
_KEPT = 7  # steps of which the median wait is taken


class _Step(NamedTuple):
    """A step that DDP has measured: its number, when it ended by this host's clock, and its parts."""

    number: int
    ended_s: float
    compute_s: float
    waited_s: float


def report_steps(emitter: Emitter, world_size: int, first_step: Callable[[], None] | None) -> None:
    """Report steps of the newest DistributedDataParallel over all ranks that this process creates from now on.

    first_step: only for rank 0, which also reports its waits; called after its first step.
    """
    newest: weakref.ref[DistributedDataParallel] | None = None

    def read(every: int) -> _Step | None:
        model = newest() if newest is not None else None
        return None if model is None else _newest_step(model, world_size, every)

    def note(owner: nn.Module, *_: Any) -> None:
        nonlocal newest
        if isinstance(owner, DistributedDataParallel):  # which registers the user's model as its only module
            is_first, newest = newest is None, weakref.ref(owner)
            if is_first:
                arguments = (emitter, read, first_step)
                threading.Thread(target=_report, args=arguments, name="ddptrain-steps", daemon=True).start()

    register_module_module_registration_hook(note)


def _newest_step(model: DistributedDataParallel, world_size: int, every: int) -> _Step | None:
    """Return the last step that DDP has measured, one of `every`; None before the first, or not of all ranks."""
    if getattr(model, "logger", None) is None:
        return None  # it is being created, or has torch's reducer in Python
    model._set_ddp_runtime_logging_sample_rate(every)  # noqa: SLF001  # there is no public function
    data: dict[str, Any] = model._get_ddp_logging_data()  # noqa: SLF001  # as above
    if data["world_size"] != world_size or not data.get("backward_comm_time"):
        return None
    compute_ns = data["forward_compute_time"] + data["backward_compute_time"]
    waited_ns = data["backward_comm_time"] - data["backward_compute_comm_overlap_time"]
    return _Step(data["iteration"], data["backward_comm_time_end"] / 1e9, compute_ns / 1e9, max(0, waited_ns) / 1e9)


def _report(emitter: Emitter, read: Callable[[int], _Step | None], first_step: Callable[[], None] | None) -> None:
    before: _Step | None = None
    waits: deque[float] = deque(maxlen=_KEPT)
    pause_s, every = _FIRST_PAUSE_S, _EVERY_STEPS
    while True:
        time.sleep(pause_s)
        step = read(every)
        if step is None or (before is not None and step.number == before.number):
            continue
        pause_s = min(_LONGER * pause_s, _MAX_PAUSE_S)
        if before is None and first_step is not None:
            first_step()
        if before is not None and step.number > before.number > _WARM_UP_STEPS:
            count = step.number - before.number
            step_s = (step.ended_s - before.ended_s) / count
            every = max(1, min(_EVERY_STEPS, int(_EVERY_S / step_s)))
            waits.append(step.waited_s)
            now_ns = time.time_ns()
            with suppress(OSError):  # the disk is full; the workload gets an error, too
                emitter.emit(events.StepTimes(now_ns, step_s, step.compute_s, step.waited_s))
                if first_step is not None:
                    emitter.emit(events.Timed(now_ns, "ranks", count * median(waits)))
        before = step
