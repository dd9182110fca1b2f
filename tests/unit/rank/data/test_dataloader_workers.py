"""Workers of DataLoaders end by a SIGTERM of their rank, and of nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data._utils import worker

from ddptrain.rank.data import dataloader_workers

# A rank that forks a worker, has a stranger send it SIGTERM, and then sends it one itself.
# torch takes 2 s of CPU time to import; its loop is replaced anyway.
PROGRAM = """
import os, signal, subprocess, sys, time, types
for name in ("torch", "torch.utils", "torch.utils.data", "torch.utils.data._utils"):
    sys.modules[name] = types.ModuleType(name)
sys.modules[name].worker = types.SimpleNamespace(_worker_loop=None)
from ddptrain.rank.data import dataloader_workers as workers

workers._torch_worker_loop = lambda *args, **kwargs: time.sleep(60 * args[0])
pid = os.fork()
if pid == 0:
    workers.worker_loop(1)
    os._exit(0)

def is_blocked():
    (line,) = [line for line in open(f"/proc/{pid}/status") if line.startswith("SigBlk")]
    return int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1

while not is_blocked():
    time.sleep(0.01)
subprocess.run(["kill", "-TERM", str(pid)], check=True)
time.sleep(0.5)
print(os.waitpid(pid, os.WNOHANG))
os.kill(pid, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_worker_ends_by_a_signal_of_its_rank_only() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["(0, 0)", "-15"], done.stderr


def test_protection_is_for_all_loaders_of_the_process() -> None:
    before = worker._worker_loop
    try:
        dataloader_workers.protect()
        assert worker._worker_loop is dataloader_workers.worker_loop
    finally:
        worker._worker_loop = before


def test_loop_of_torch_runs_with_sigterm_blocked_and_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class Thread:
        def __init__(self, target: Any, args: Any, daemon: bool) -> None:
            self.made = (target, args, daemon)

        def start(self) -> None:
            done.append(self.made)

    monkeypatch.setattr(signal, "pthread_sigmask", lambda *given: done.append(given))
    monkeypatch.setattr(threading, "Thread", Thread)
    monkeypatch.setattr(dataloader_workers, "_torch_worker_loop", lambda *given, **more: done.append((given, more)))
    dataloader_workers.worker_loop(1, 2, seed=3)
    watch = (dataloader_workers._await_sigterm_of_rank, (os.getppid(),), True)
    assert done == [(signal.SIG_BLOCK, {signal.SIGTERM}), watch, ((1, 2), {"seed": 3})]


@pytest.mark.parametrize(
    ("senders", "parent", "waits"),
    [([50], 50, 1), ([7, 8, 50], 50, 3), ([50], 1, 1), ([7], 1, 1)],  # the last two: the rank has ended
)
def test_only_the_rank_or_its_end_lets_sigterm_through(
    monkeypatch: pytest.MonkeyPatch, senders: list[int], parent: int, waits: int
) -> None:
    done: list[Any] = []
    sent = iter(senders)

    def wait(signals: set[int]) -> Any:
        done.append(signals)
        return SimpleNamespace(si_pid=next(sent))

    monkeypatch.setattr(signal, "sigwaitinfo", wait)
    monkeypatch.setattr(os, "getppid", lambda: parent)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *given: done.append(given))
    monkeypatch.setattr(signal, "pthread_kill", lambda *given: done.append(given))
    dataloader_workers._await_sigterm_of_rank(50)
    kill = (threading.get_ident(), signal.SIGTERM)
    assert done == [{signal.SIGTERM}] * waits + [(signal.SIG_UNBLOCK, {signal.SIGTERM}), kill]
