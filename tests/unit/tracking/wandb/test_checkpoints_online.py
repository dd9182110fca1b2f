"""Checkpoints that the tracker sends to a stand-in for W&B's server while the run is on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import PATIENCE_S
from tests.servers.wandb_backend import Backend, wandb_backend

ONLINE = """
import sys, time
from pathlib import Path
from ddptrain.tracking import protocol as items
from ddptrain.tracking.protocol import Facts
from ddptrain.tracking.wandb import WandbTracker

folder = Path(sys.argv[1])
tracker = WandbTracker({"checkpoints": True})
told = {"mode": "rank0", "online": True, "id": "w1"}
tracker.start(Facts("a-run", "pets", 1, 0, 1, 0, 0, 1, folder / "run" / "tracking", from_driver=told))
for step in range(1, int(sys.argv[2]) + 1):
    lent = folder / "lent" / str(step)
    lent.mkdir(parents=True)
    (lent / "model.safetensors").write_bytes(bytes([step]) * 1000)
    tracker.log(items.Checkpoint(time.time_ns(), step, lent, {"val/loss": 1.0 / step}))
    (lent / "model.safetensors").unlink()  # as ranks do, once log() has returned
print("all logged", flush=True)
sys.stdin.readline()
tracker.finish("finished")
"""


@pytest.fixture
def backend() -> Iterator[Backend]:
    with wandb_backend() as there:
        yield there


@contextmanager
def checkpoints_online(folder: Path, backend: Backend, count: int) -> Iterator[subprocess.Popen[str]]:
    """A rank that logs so many checkpoints, says so, and ends once it hears of it."""
    command = [sys.executable, "-c", ONLINE, str(folder), str(count)]
    with subprocess.Popen(
        command,
        env={**os.environ, **backend.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as rank:
        try:
            yield rank
        finally:
            rank.kill()


@pytest.mark.long
def test_checkpoints_that_came_too_fast_for_the_server_are_counted(tmp_path: Path, backend: Backend) -> None:
    backend.held = "CommitArtifact"
    with checkpoints_online(tmp_path, backend, 6) as rank:
        assert rank.stdout is not None
        while "all logged" not in (line := rank.stdout.readline()):
            assert line
        backend.held = ""
        said, _ = rank.communicate("end\n", timeout=PATIENCE_S)
    assert rank.returncode == 0, said
    made = [each for each in backend.artifacts.values() if each.type == "model"]
    committed = [alias for each in made if each.state == "COMMITTED" for alias in each.aliases if alias != "latest"]
    # The first one is that which was the newest when the sender had started.
    assert len(committed) == 2 and committed[-1] == "step-6", "the one that was on its way, and the newest"
    (line,) = [line for line in said.splitlines() if "W&B lacks" in line]
    assert "lacks checkpoints (4) that were replaced by newer ones" in line
