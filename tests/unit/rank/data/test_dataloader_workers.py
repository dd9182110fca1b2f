"""Workers of DataLoaders end by a SIGTERM of their rank, and of nobody else."""

from __future__ import annotations

import subprocess
import sys

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
