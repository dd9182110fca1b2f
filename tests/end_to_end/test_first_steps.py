"""What a new user types first: one run of each workload, a cluster, a failure, a resume. `make test` runs these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli, Finished

ROOT = Path(__file__).parents[2]
# Fails at step 2 of its first attempt, and counts in a checkpoint how far it has come.
FUNCTION = """
import torch

def train(ctx, steps: int = 4, fail: bool = False):
    model = torch.nn.Linear(1, 1)
    resumed = ctx.resume(model=model)
    for step in range(resumed.step + 1 if resumed else 1, steps + 1):
        print("step", step)
        if fail and step == 3 and ctx.rank == 1:
            raise ValueError("bad batch")
        ctx.log({"loss": 1.0 / step}, step=step)
        ctx.checkpoint(model=model, step=step, epoch=step, metrics={"loss": 1.0 / step})
    return {"steps": steps}
"""


def last_run(cli: Cli) -> dict[str, Any]:
    done = cli("results", "show", "latest", "--json")
    assert done.rc == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def on(cluster: str, *args: str | Path) -> tuple[str | Path, ...]:
    return (*args, "--cluster", cluster, "--ranks", "2")


def ended(done: Finished, rc: int = 0) -> Finished:
    assert done.rc == rc, done
    return done


def test_readme_trains_pet_names_and_generates_names(run_cli: Cli) -> None:
    """The first screen of the README, with one epoch, on an embedded cluster."""
    done = ended(run_cli("train", ROOT / "configs" / "petnames.yaml", "--set", "params.epochs=1", "--ranks", "2"))
    lines = done.stdout.splitlines()
    assert any(line.startswith("[rank 0] epoch 1/1: train/loss ") for line in lines), done.stdout
    assert "succeeded after" in done.stdout + done.stderr
    assert len(ended(run_cli("generate", "latest", "--count", "5", "--seed", "1")).stdout.splitlines()) == 5


def test_images_are_trained_and_classified(run_cli: Cli, warm_cluster: str) -> None:
    config = ROOT / "configs" / "images-local.yaml"
    ended(run_cli("train", *on(warm_cluster, config), "--set", "params.epochs=1"))
    record = last_run(run_cli)
    assert (record["status"], record["world_size"]) == ("succeeded", 2)
    last = record["last_metrics"]
    assert 0 <= last["val/accuracy"] <= 1 and 0 <= last["train/accuracy"] <= 1 and last["samples"] == 480
    assert last["samples_per_s"] > 0 and last["train/loss"] > 0


def test_script_for_torchrun_runs_unchanged(run_cli: Cli, warm_cluster: str) -> None:
    done = ended(run_cli("run", *on(warm_cluster), ROOT / "examples" / "torchrun_script.py"))
    assert "[rank 0]" in done.stdout and "[rank 1]" in done.stdout


def test_failure_names_its_cause_and_a_resume_goes_on_where_it_was(run_cli: Cli, warm_cluster: str) -> None:
    (run_cli.folder / "work.py").write_text(FUNCTION)
    config = {"workload": "work:train", "params": {"fail": True}, "checkpoint": {"metric": "loss"}}
    (run_cli.folder / "work.yaml").write_text(json.dumps(config))
    failed = ended(run_cli("train", *on(warm_cluster, "work.yaml")), rc=1)
    assert "rank 1 on" in failed.stderr and "failed first: ValueError: bad batch" in failed.stderr
    resumed = ended(
        run_cli(
            "train", *on(warm_cluster, "work.yaml"), "--resume", "auto", "--allow-changes", "--set", "params.fail=false"
        )
    )
    assert "step 2" not in resumed.stdout and "step 4" in resumed.stdout
    record = last_run(run_cli)
    assert (record["status"], len(record["attempts"]), record["result"]) == ("succeeded", 2, {"steps": 4})


@pytest.mark.parametrize("arguments", [("--set", "params.epochz=3"), ("--ranks", "0")])
def test_mistake_is_named_before_anything_starts(run_cli: Cli, arguments: tuple[str, ...]) -> None:
    done = ended(run_cli("train", "petnames", *arguments), rc=2)
    assert arguments[1].partition("=")[0] in done.stderr and not (run_cli.folder / "runs").exists()
