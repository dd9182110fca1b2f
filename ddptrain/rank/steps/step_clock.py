"""Measures each step of DDP: the time from the end of a gradient exchange to the next one, and the wait in that one.

A hook on two parameters notices that a backward pass has begun; it does not change gradients. Then two callbacks of the
autograd engine are queued, one before and one after DDP's own callback, which waits for the gradients of other ranks.
The time between the two callbacks is the wait; all time before is the rank's own work, with its data loading. DDP's
logging data (`_get_ddp_logging_data`) are not used: they measure each hundredth step, and on a GPU wait for the device.

On a GPU, CUDA events measure the same in the stream. They are read later, so that nothing waits for the device.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from ddptrain.protocol import events
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.steps.step_window import StepWindow
from ddptrain.rank.steps.timed_activities import OtherTime, other_time
from ddptrain.rank.steps.waiting_time import WaitingTime

_MAX_PENDING = 256  # steps on the GPU whose events are not complete


class _Mark(NamedTuple):
    """A moment: seconds on the CPU, a CUDA event on a GPU. other_s: the time without training until then."""

    at: Any
    other_s: float


class StepClock:
    """Measures the steps of all DDP models of this process.

    `report` gets the own time and the wait in seconds of each step except the first; `first` is called after the first.
    """

    def __init__(
        self,
        report: Callable[[float, float], None],
        other: OtherTime = other_time,
        first: Callable[[], None] = lambda: None,
    ) -> None:
        self._report = report
        self._first = first
        self._other = other
        self._task = -1
        self._on_gpu = False
        self._ready: _Mark | None = None
        self._exchanged: _Mark | None = None
        self._pending: deque[tuple[_Mark, _Mark, _Mark]] = deque(maxlen=_MAX_PENDING)
        self._is_off = False

    def watch(self, model: DistributedDataParallel) -> None:
        """Measure the steps of a model that has just been wrapped."""
        if distributed.get_world_size(model.process_group) == 1:
            return
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        on_gpu = parameters[0].device.type == "cuda"
        if not on_gpu and parameters[0].device.type != "cpu":
            return
        reference = weakref.ref(model)
        for parameter in {id(each): each for each in (parameters[0], parameters[-1])}.values():
            parameter.register_hook(lambda _: self._on_gradient(reference, on_gpu=on_gpu))

    def _on_gradient(self, reference: weakref.ref[DistributedDataParallel], *, on_gpu: bool) -> None:
        """Queue our first callback: a backward pass has reached a watched parameter. DDP queues its callback later."""
        task = torch._C._current_graph_task_id()  # noqa: SLF001  # there is no public function
        if self._is_off or task == self._task:
            return
        self._task = task
        model: Any = reference()
        if model is not None and model.require_backward_grad_sync:
            self._on_gpu = on_gpu
            self._queue(self._on_ready)

    def _queue(self, callback: Callable[[], None]) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001  # as FSDP does

    def _on_ready(self) -> None:
        """Note that the rank has computed all gradients. The callback that is queued now runs after DDP's."""
        self._ready = self._mark()
        self._queue(self._on_exchanged)

    def _on_exchanged(self) -> None:
        """Measure the step: the rank has received the gradients of all ranks."""
        before, ready, self._exchanged, self._ready = self._exchanged, self._ready, self._mark(), None
        if before is None and self._exchanged is not None:
            self._first()
        if self._exchanged is None or ready is None or before is None:
            return
        step = (before, ready, self._exchanged)
        try:
            self._measure(step)
        except Exception:  # an error of the measurement must not end the training
            self._is_off = True

    def _mark(self) -> _Mark | None:
        if not self._on_gpu:
            return _Mark(time.perf_counter(), self._other.total_s)
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return _Mark(event, self._other.total_s)

    def _measure(self, step: tuple[_Mark, _Mark, _Mark]) -> None:
        before, ready, exchanged = step
        if not self._on_gpu:
            other_s = ready.other_s - before.other_s
            self._report(max(0.0, ready.at - before.at - other_s), exchanged.at - ready.at)
            return
        self._pending.append(step)
        while self._pending and self._pending[0][2].at.query():
            before, ready, exchanged = self._pending.popleft()
            own_s = before.at.elapsed_time(ready.at) / 1e3 - (ready.other_s - before.other_s)
            self._report(max(0.0, own_s), ready.at.elapsed_time(exchanged.at) / 1e3)


def measure_steps(emitter: Emitter | None, waiting: WaitingTime | None) -> None:
    """Measure the steps of each DistributedDataParallel that this process creates from now on.

    emitter: receives summaries for the comparison of ranks. waiting: sums up the waits of this rank.
    """
    window = StepWindow()

    def report(own_s: float, waited_s: float) -> None:
        if waiting is not None:
            waiting.add("ranks", waited_s)
        if emitter is None:
            return
        if (summary := window.add(own_s, waited_s, time.perf_counter())) is not None:
            with suppress(OSError):  # the disk is full; the workload gets an error, too
                emitter.emit(events.StepTimes(time.time_ns(), *summary))

    clock = StepClock(report, first=waiting.first_step if waiting is not None else lambda: None)
    # Not the constructor: torch's warnings name its caller's line.
    ddp: Any = DistributedDataParallel
    wrapped = ddp._ddp_init_helper  # noqa: SLF001

    @functools.wraps(wrapped)
    def init(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        wrapped(self, *args, **options)
        clock.watch(self)

    ddp._ddp_init_helper = init  # noqa: SLF001
