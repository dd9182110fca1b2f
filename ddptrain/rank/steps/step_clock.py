"""Measures each step of DDP: from the end of the last gradient exchange to the next one, and how long that one took.

A backward pass ends with two callbacks of the autograd engine around DDP's own, which waits for the gradients of the
other ranks. Between them is the wait; all of the time before is the rank's own work, with its data loading. For this a
hook on two parameters notices that a backward pass has begun. It changes no gradient. DDP's own logging data
(`_get_ddp_logging_data`) is not used: it measures each hundredth step, and on a GPU it waits for the device.

On a GPU, CUDA events measure the same in the stream, and are read later, so that nothing waits for the device.
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
from ddptrain.rank.steps.non_training_time import OtherTime, other_time
from ddptrain.rank.steps.step_window import StepWindow
from ddptrain.rank.steps.waiting_time import WaitingTime

_MOST_PENDING = 256  # steps on the GPU whose events are not complete


class _Mark(NamedTuple):
    """A moment: on the CPU in seconds, on a GPU as a CUDA event. other_s: time that was no training, until then."""

    at: Any
    other_s: float


class StepClock:
    """Measures the steps of all DDP models of this process.

    `report` gets own time and wait in seconds of each step but the first, `first` is called after that.
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
        self._arrived: _Mark | None = None
        self._left: _Mark | None = None
        self._pending: deque[tuple[_Mark, _Mark, _Mark]] = deque(maxlen=_MOST_PENDING)
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
        """A backward pass has come to a watched parameter; DDP queues its callback after this."""
        task = torch._C._current_graph_task_id()  # noqa: SLF001  # there is no public way
        if self._is_off or task == self._task:
            return
        self._task = task
        model: Any = reference()
        if model is not None and model.require_backward_grad_sync:
            self._on_gpu = on_gpu
            self._queue(self._on_arrived)

    def _queue(self, callback: Callable[[], None]) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(callback)  # noqa: SLF001  # as FSDP does

    def _on_arrived(self) -> None:
        """The rank has computed all gradients. The callback that is queued now comes after DDP's."""
        self._arrived = self._mark()
        self._queue(self._on_left)

    def _on_left(self) -> None:
        """The rank has the gradients of all ranks."""
        before, arrived, self._left, self._arrived = self._left, self._arrived, self._mark(), None
        if before is None and self._left is not None:
            self._first()
        if self._left is None or arrived is None or before is None:
            return
        step = (before, arrived, self._left)
        try:
            self._measure(step)
        except Exception:  # a measurement must not end the training: it is left out from now on
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
        before, arrived, left = step
        if not self._on_gpu:
            other_s = arrived.other_s - before.other_s
            self._report(max(0.0, arrived.at - before.at - other_s), left.at - arrived.at)
            return
        self._pending.append(step)
        while self._pending and self._pending[0][2].at.query():
            before, arrived, left = self._pending.popleft()
            own_s = before.at.elapsed_time(arrived.at) / 1e3 - (arrived.other_s - before.other_s)
            self._report(max(0.0, own_s), arrived.at.elapsed_time(left.at) / 1e3)


def measure_steps(emitter: Emitter | None, waiting: WaitingTime | None) -> None:
    """Measure the steps of each DistributedDataParallel that this process creates from now on.

    emitter: where summaries for the comparison of ranks go. waiting: what adds up the waits of this rank.
    """
    window = StepWindow()

    def report(own_s: float, waited_s: float) -> None:
        if waiting is not None:
            waiting.add("ranks", waited_s)
        if emitter is None:
            return
        if (found := window.add(own_s, waited_s, time.perf_counter())) is not None:
            with suppress(OSError):  # the disk is full: the workload notices that by itself
                emitter.emit(events.StepTimes(time.time_ns(), *found))

    clock = StepClock(report, first=waiting.first_step if waiting is not None else lambda: None)
    wrapped = DistributedDataParallel.__init__

    @functools.wraps(wrapped)
    def init(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        wrapped(self, *args, **options)
        clock.watch(self)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
