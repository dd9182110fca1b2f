"""DataLoader workers outlive a SIGTERM to all processes of a job, and are otherwise as under torchrun."""

from __future__ import annotations

import pytest

from tests.contract.conftest import Project

LOADER = """
import os, subprocess, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Pids(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return os.getpid()

class Children(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        started = subprocess.Popen(["sleep", "60"])
        started.terminate()
        forked = os.fork()
        if forked == 0:
            time.sleep(60)
            os._exit(1)
        os.kill(forked, 15)
        return started.wait(60), os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])

if __name__ == "__main__":
    loader = DataLoader(Children(), num_workers=1, multiprocessing_context=sys.argv[1])
    print("children ended with", [int(code) for batch in loader for code in batch])
    batches = iter(DataLoader(Pids(), num_workers=1, prefetch_factor=1, multiprocessing_context=sys.argv[1]))
    pids = [int(next(batches))]
    subprocess.run(["kill", "-TERM", str(pids[0])], check=True)
    pids += [int(next(batches)), int(next(batches)), int(next(batches))]
    print("workers:", len(set(pids)))  # the iterator is still open when the script ends
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_ignore_sigterm_of_others_but_their_children_do_not(
    project: Project, shared_cluster: str, method: str
) -> None:
    project.write("loading.py", LOADER)
    done = project("run", "--cluster", shared_cluster, "--ranks", "1", "loading.py", "--", method, rc=0)
    assert "children ended with [-15, -15]" in done.stdout
    assert "workers: 1" in done.stdout
    assert "Traceback" not in done.stdout
