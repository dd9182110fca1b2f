"""What the context helps with, in real ranks: a model prepared, data fed, numbers shared; interrupted in mid epoch."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.conftest import Cli

WORKLOAD = """
import os, signal
import torch


def train(ctx, epochs=3, die_at=0):
    torch.manual_seed(0)
    with ctx.rank_zero_first():
        if ctx.rank == 0:
            open(f"downloaded-{ctx.run_id}", "a").close()
        assert os.path.exists(f"downloaded-{ctx.run_id}")
    model = ctx.prepare(torch.nn.Linear(4, 1))
    assert model(torch.ones(2, 4)).dtype == torch.bfloat16  # as the configuration says
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.utils.data.TensorDataset(torch.arange(64.0).repeat(4, 1).T / 64)
    loader = ctx.loader(data, batch_size=8, num_workers=1)
    resumed = ctx.resume(model=model, optimizer=optimizer)
    step = resumed.step if resumed else 0
    for epoch in ctx.epochs(epochs):
        for (rows,) in loader:
            loss = model(rows).float().pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            assert ctx.all_finite(loss)
            assert not ctx.all_finite(float("nan") if ctx.rank == 1 else 1.0)
            ctx.log({"train/loss": ctx.mean(loss)}, step=step, epoch=epoch)
            ctx.checkpoint(model=model, optimizer=optimizer, step=step, last=step == epochs * len(loader))
            if step == die_at and ctx.attempt == 1:
                ctx.close()  # what was saved is home
                torch.distributed.barrier()
                if ctx.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
    assert ctx.mean(ctx.rank) == 0.5 and ctx.mean(ctx.rank, weight=ctx.rank) == 1.0
    return {"steps": step}
"""


def assert_equal_after_a_fault(
    run_cli: Cli, address: str, workload: str, prepare: dict[str, Any], result: dict[str, int], saved: int
) -> None:
    """Train without a fault, and again with a rank killed at step 6, from which the checkpoint of step `saved` is left:
    both have the same result and the same weights.
    """
    (run_cli.folder / "work.py").write_text(workload)
    config = run_cli.folder / "config.yaml"
    content = {
        "workload": "work:train",
        "cluster": {"ranks": 2, "address": address},
        "prepare": prepare,
        "failure": {"max_restarts": 1},
        "checkpoint": {"metric": None, "every_steps": 1},
    }
    config.write_text(json.dumps(content))
    whole = run_cli("train", config, "--run-id", "whole")
    assert whole.rc == 0, whole.stderr
    killed = run_cli("train", config, "--run-id", "killed", "--set", "params.die_at=6")
    assert killed.rc == 0, killed.stderr
    assert f"starting the ranks again, with the checkpoint of step {saved}" in killed.stderr
    runs = run_cli.folder / "runs"
    assert record(runs / "killed")["result"] == record(runs / "whole")["result"] == result
    assert weights(runs / "killed", 12) == weights(runs / "whole", 12)


def test_function_that_leaves_it_to_the_context_ends_alike_with_and_without_a_fault(
    run_cli: Cli, warm_cluster: str
) -> None:
    assert_equal_after_a_fault(run_cli, warm_cluster, WORKLOAD, {"precision": "bf16"}, {"steps": 12}, 6)


def record(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "run.json").read_text())
    return found


def weights(run: Path, step: int) -> dict[str, bytes]:
    file = run / "checkpoints" / f"step-{step}" / "model.safetensors"
    return {name: value.tobytes() for name, value in load_file(file).items()}


STEPS = """
import torch


def train(ctx):
    model = ctx.prepare(torch.nn.Linear(4, 1))
    for step in range(1, 6):
        model(torch.ones(2, 4)).sum().backward()
        ctx.progress(step, 5, unit="steps")
"""


def test_profile_of_the_configuration_is_recorded_by_its_rank(run_cli: Cli, warm_cluster: str) -> None:
    (run_cli.folder / "work.py").write_text(STEPS)
    config = run_cli.folder / "config.yaml"
    content = {"workload": "work:train", "cluster": {"ranks": 2, "address": warm_cluster}}
    config.write_text(json.dumps({**content, "profile": {"steps": [2, 4], "ranks": [1]}}))
    done = run_cli("train", config, "--run-id", "profiled")
    assert done.rc == 0, done.stderr
    run = run_cli.folder / "runs" / "profiled"
    folder = run / "artifacts" / "profile" / "steps-2-4"
    assert sorted(path.name for path in folder.iterdir()) == ["rank-1.pt.trace.json.gz"]
    with gzip.open(folder / "rank-1.pt.trace.json.gz") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {name for name in names if name.startswith("ProfilerStep")} == {f"ProfilerStep#{step}" for step in (2, 3, 4)}
    assert (run / "logs" / "rank-1.log").read_text() == ""  # torch.profiler writes nothing there
