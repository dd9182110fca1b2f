"""DataLoader workers take SIGTERM from their rank alone: where a whole host is told to go, the step can be finished.

A batch system sends the signal to every process of a job. The rank takes it as a notice; its loaders' workers would
die of it, and the rank of them.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from torch.utils.data._utils import worker

_torchs_own = worker._worker_loop  # noqa: SLF001


def protect() -> None:
    """Have the workers of all DataLoaders that this process makes from now on pass over SIGTERM of others."""
    worker._worker_loop = worker_loop  # noqa: SLF001


def worker_loop(*args: Any, **kwargs: Any) -> None:
    """What a DataLoader's worker runs: torch's own loop, with a thread that looks at who has sent SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_await_the_rank, args=(os.getppid(),), daemon=True).start()
    _torchs_own(*args, **kwargs)


def _await_the_rank(rank_pid: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank_pid == os.getppid():
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
