"""Makes DataLoader workers ignore SIGTERM, so that a preempted rank can finish its step.

A batch system sends SIGTERM to all processes of a job. The rank handles it as a preemption notice, but its DataLoader
workers would end, and the rank would fail. The rank itself ends its workers by SIGKILL. The signal is neither blocked
nor set to SIG_IGN, which processes that a worker starts would inherit.
"""

from __future__ import annotations

import functools
import os
import signal
import weakref
from typing import Any

from torch.utils.data import _utils, dataloader
from torch.utils.data._utils import worker

_signals: Any = _utils.signal_handling
_torch_worker_loop = worker._worker_loop  # noqa: SLF001


def protect() -> None:
    """Protect the workers of all DataLoaders that this process creates from now on."""
    iterator: Any = dataloader._MultiProcessingDataLoaderIter  # noqa: SLF001
    start_workers = iterator.__init__

    @functools.wraps(start_workers)
    def start_protected(self: Any, loader: Any) -> None:
        start_workers(self, loader)
        for process in self._workers:
            process._popen.terminate = functools.partial(_kill, weakref.ref(self), process._popen)  # noqa: SLF001

    iterator.__init__ = start_protected
    worker._worker_loop = worker_loop  # noqa: SLF001


def _kill(reference: weakref.ref[Any], process: Any) -> None:
    """End a worker as Process.terminate() does; torch must not report it as killed."""
    iterator = reference()
    if iterator is not None and iterator._worker_pids_set:  # noqa: SLF001
        _signals._remove_worker_pids(id(iterator))  # noqa: SLF001
        iterator._worker_pids_set = False  # noqa: SLF001
    process.kill()


def worker_loop(*args: Any, **kwargs: Any) -> None:
    """Run torch's loop of a DataLoader worker, which first sets its own signal handlers."""
    set_handlers = _signals._set_worker_signal_handlers  # noqa: SLF001

    def set_handlers_and_ours() -> None:
        set_handlers()
        signal.signal(signal.SIGTERM, _ignore)

    os.register_at_fork(before=_hold_sigterm, after_in_parent=_take_sigterm, after_in_child=_end_on_sigterm)
    _signals._set_worker_signal_handlers = set_handlers_and_ours  # noqa: SLF001
    _torch_worker_loop(*args, **kwargs)


def _ignore(*_: object) -> None:
    """Handle a signal by doing nothing."""


def _hold_sigterm() -> None:
    """Before a fork: a signal to the child must wait until the child has its own handler."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _take_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _end_on_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is _ignore:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _take_sigterm()
