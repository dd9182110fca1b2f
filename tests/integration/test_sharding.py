"""A sharded model with real ranks: killed, resumed with another number of ranks, consolidated, compared."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import Cli

WORKLOAD = '''
import os, signal, time
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 16), nn.Linear(16, 5)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def train(ctx, die_at=0):
    """All ranks have the same data, so that any number of ranks gives the same weights."""
    torch.manual_seed(ctx.rank)
    model = nn.Sequential()
    model.blocks = nn.ModuleList(Block() for _ in range(2))
    model.forward = lambda x: model.blocks[1](model.blocks[0](x))
    model = ctx.prepare(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    resumed = ctx.resume(model=model, optimizer=optimizer)
    for step in range(resumed.step + 1 if resumed else 1, 5):
        if step == die_at and ctx.rank == 1:
            while not os.path.exists(f"runs/{ctx.run_id}/checkpoints/step-{step - 1}/checkpoint.json"):
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.randn(8, 5, generator=torch.Generator().manual_seed(step))).pow(2).mean().backward()
        optimizer.step()
        ctx.checkpoint(model=model, optimizer=optimizer, step=step)
'''


def reference() -> dict[str, Any]:
    """The weights after the same training in this process, without ranks."""
    saved: dict[str, Any] = {}

    def checkpoint(model: Any, **_: Any) -> None:
        saved.update({name: value.numpy().copy() for name, value in model.state_dict().items()})

    names: dict[str, Any] = {}
    exec(WORKLOAD, names)
    plain = {"prepare": lambda model: model, "resume": lambda **_: None, "checkpoint": checkpoint}
    names["train"](SimpleNamespace(rank=0, **plain))
    return saved


def config(folder: Path, ranks: int, **params: int) -> Path:
    path = folder / "fsdp.yaml"
    content = {
        "workload": "work:train",
        "name": "fsdp",
        "cluster": {"ranks": ranks},
        "params": params,
        "prepare": {"strategy": "fsdp", "activation_checkpointing": ["Block"]},
        "checkpoint": {"every_steps": 1, "metric": None},
    }
    path.write_text(json.dumps(content))
    return path


@pytest.mark.slow
def test_killed_sharded_run_goes_on_with_more_ranks_as_if_nothing_had_happened(run_cli: Cli) -> None:
    folder = run_cli.folder
    (folder / "work.py").write_text(WORKLOAD)
    assert run_cli("train", config(folder, 2, die_at=3)).rc == 1
    resumed = run_cli("train", config(folder, 3), "--resume", "auto", "--allow-changes")
    assert resumed.rc == 0, resumed.stderr
    assert "resuming with the checkpoint of step 2" in resumed.stderr

    (run,) = (folder / "runs").glob("fsdp-*")
    home = run / "checkpoints" / "step-4"
    files = sorted(path.name for path in home.iterdir())
    assert [name for name in files if name.startswith("model.")] == [
        f"model.rank-{rank}.safetensors" for rank in range(3)
    ]
    done = run_cli("results", "export", "--format", "safetensors", run.name, "--step", "4", "-o", "out")
    assert done.rc == 0, done.stderr
    found = load_file(folder / "out" / "model.safetensors")
    expected = reference()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.allclose(found[name], value, rtol=0, atol=1e-6), name
    promoted = run_cli("models", "promote", "blocks", run.name)
    assert promoted.rc == 0, promoted.stderr
    version = folder / "models" / "blocks" / "versions" / "1" / "checkpoints" / "step-4"
    assert (version / "model.safetensors").read_bytes() == (folder / "out" / "model.safetensors").read_bytes()
