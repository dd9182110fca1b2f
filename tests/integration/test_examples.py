"""The programs in examples/, and what `ddptrain init` writes, do what they are there to show."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli

EXAMPLES = Path(__file__).parents[2] / "examples"


def record(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return told


def test_what_init_writes_trains_and_goes_on(run_cli: Cli, warm_cluster: str) -> None:
    assert run_cli("init", "demo").rc == 0
    demo = run_cli.folder / "demo"
    done = run_cli("train", "train.yaml", "--run-id", "mine", "--set", "params.epochs=3", cwd=demo)
    assert done.rc == 0, done.stderr
    told = record(demo / "runs" / "mine")
    assert told["status"] == "succeeded" and told["world_size"] == 2
    assert told["checkpoints"] == ["step-96"] and told["best"]["metric"] == "loss"
    assert told["last_metrics"]["accuracy"] > 0.5
    longer = ("--set", "params.epochs=4", "--allow-changes", "--resume", "mine")
    assert run_cli("train", "train.yaml", *longer, "--cluster", warm_cluster, cwd=demo).rc == 0
    assert record(demo / "runs" / "mine")["checkpoints"][0] == "step-128"


def test_migrated_notebook_brings_its_logs_and_its_model_home(run_cli: Cli) -> None:
    out = run_cli.folder / "out"
    done = run_cli(EXAMPLES / "migrate_from_dask_pytorch_ddp.py", out, program=(sys.executable,), timeout_s=110)
    assert done.rc == 0, done.stderr
    for rank in (0, 1):
        logs = [json.loads((out / "logs" / f"worker-{rank}" / f"epoch-{epoch}.json").read_text()) for epoch in range(3)]
        assert [log["epoch"] for log in logs] == [0, 1, 2] and logs[2]["loss"] < logs[0]["loss"]
    assert (out / "model.pkl").stat().st_size > 10_000
    assert "INFO - rank 1, epoch 2: loss" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_hugging_face_model_learns(run_cli: Cli) -> None:
    done = run_cli("train", EXAMPLES / "huggingface.yaml", "--run-id", "mine", timeout_s=110)
    assert done.rc == 0, done.stderr
    metrics = (run_cli.folder / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in metrics if json.loads(line)["rank"] == 0]
    assert losses[-1] < losses[0] - 0.5
