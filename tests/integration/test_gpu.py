"""On a machine with NVIDIA GPUs: one rank per GPU over NCCL, each seeing its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Cli

pytestmark = pytest.mark.gpu

WORKLOAD = """
import os
import torch
import torch.distributed as dist


def main(ctx):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1).to(ctx.device))
    model(torch.ones(2, 4, device=ctx.device)).sum().backward()
    ctx.checkpoint(model=model, step=1, metrics={"val/loss": 1.0})
    print(ctx.device, torch.cuda.device_count(), dist.get_backend(), os.environ["CUDA_VISIBLE_DEVICES"])
"""


def test_every_gpu_gets_a_rank_that_sees_it_alone(tmp_path: Path, run_cli: Cli) -> None:
    (tmp_path / "work.py").write_text(WORKLOAD)
    (tmp_path / "run.yaml").write_text("workload: work:main\nname: gpu\n")
    ended = run_cli("train", "run.yaml", "--run-id", "gpu", timeout_s=110)
    assert ended.rc == 0, ended.stderr
    record = json.loads((tmp_path / "runs/gpu/run.json").read_text())
    logs = [(tmp_path / f"runs/gpu/logs/rank-{rank}.log").read_text() for rank in range(record["world_size"])]
    assert all("cuda:0 1 nccl" in log for log in logs)
    assert len({log.split()[-1] for log in logs}) == record["world_size"]
    assert all(rank["gpu"] for rank in record["attempts"][0]["ranks"])


def test_gpus_0_trains_on_the_cpu(tmp_path: Path, run_cli: Cli) -> None:
    (tmp_path / "work.py").write_text(WORKLOAD)
    (tmp_path / "run.yaml").write_text("workload: work:main\nname: cpu\ncluster: {ranks: 2, gpus: 0}\n")
    ended = run_cli("train", "run.yaml", "--run-id", "cpu", timeout_s=110)
    assert ended.rc == 0, ended.stderr
    assert "cpu 0 gloo" in (tmp_path / "runs/cpu/logs/rank-1.log").read_text()


def test_more_gpus_than_there_are_is_a_cluster_error(tmp_path: Path, run_cli: Cli) -> None:
    (tmp_path / "run.yaml").write_text("workload: work:main\ncluster: {gpus: 999}\n")
    assert run_cli("train", "run.yaml").rc == 4
