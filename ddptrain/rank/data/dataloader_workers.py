"""Makes DataLoader workers ignore SIGTERM unless their rank sends it, so that a preempted rank can finish its step.

A batch system sends SIGTERM to all processes of a job. The rank handles it as a preemption notice, but its DataLoader
workers would end, and the rank would fail.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from torch.utils.data._utils import worker

_torch_worker_loop = worker._worker_loop  # noqa: SLF001


def protect() -> None:
    """Protect the workers of all DataLoaders that this process creates from now on."""
    worker._worker_loop = worker_loop  # noqa: SLF001


def worker_loop(*args: Any, **kwargs: Any) -> None:
    """Run torch's loop of a DataLoader worker, and a thread that checks the sender of SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_await_sigterm_of_rank, args=(os.getppid(),), daemon=True).start()
    _torch_worker_loop(*args, **kwargs)


def _await_sigterm_of_rank(rank_pid: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank_pid == os.getppid():
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
