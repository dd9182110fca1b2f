"""What W&B gets besides numbers, from real runs: pictures; and user code that has its own W&B."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conftest import Cli
from tests.servers.wandb_training import OfflineRun

OFFLINE = {"WANDB_MODE": "offline"}

# Its loader forks while wandb's threads are there, and it leaves its own run open at its end.
OWN = """
import os
import torch
import wandb


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((4,), float(index))


def steps(ctx, folder):
    assert not [name for name in os.environ if name.startswith("WANDB_") and name != "WANDB_MODE"] or ctx.rank == 0
    run = wandb.init(project="mine", mode="offline", dir=folder, id=f"mine-{ctx.rank}")
    step = 0
    for epoch in range(4):
        for batch in torch.utils.data.DataLoader(Data(), 8, num_workers=2, multiprocessing_context="fork"):
            step += 1
            ctx.log({"train/loss": 1 / step}, step=step)
            run.log({"own": step})
"""


def train(cli: Cli, config: dict[str, Any]) -> Path:
    (cli.folder / "c.yaml").write_text(json.dumps(config))
    ended = cli("train", "c.yaml", timeout_s=100)
    assert ended.rc == 0, ended.stderr
    (run,) = (entry for entry in (cli.folder / "runs").iterdir() if entry.is_dir() and not entry.is_symlink())
    return run


def offline_runs(folder: Path) -> list[OfflineRun]:
    return [OfflineRun(path) for path in sorted(folder.rglob("run-*.wandb"))]


def test_users_own_wandb_and_loaders_that_fork_get_along_with_the_tracker(run_cli: Cli, warm_cluster: str) -> None:
    (run_cli.folder / "own.py").write_text(OWN)
    own = run_cli.folder / "own"
    own.mkdir()
    run = train(
        run_cli,
        {
            "workload": "own:steps",
            "cluster": {"ranks": 2, "address": warm_cluster},
            "params": {"folder": str(own)},
            "tracking": {"wandb": {"log_every": 1}},
            "env": OFFLINE,
        },
    )
    steps = [*range(1, 17)]
    (ours,) = offline_runs(run / "tracking")
    assert [row["step"] for row in ours.history] == steps
    assert ours.exit_code == 0
    mine = sorted(offline_runs(own), key=lambda each: str(each.run["run_id"]))  # their folders: by when they began
    assert [each.run["run_id"] for each in mine] == ["mine-0", "mine-1"]
    for each in mine:
        assert [row["own"] for row in each.history] == steps
        assert each.exit_code == 0, "it was left open, and is ended all the same"
