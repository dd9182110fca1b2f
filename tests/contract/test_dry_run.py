"""`--dry-run`, and the configuration that a sweep writes: a verdict, and only the fields that were chosen."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.contract.conftest import Project

FUNCTION = """
def train(ctx, lr: float = 0.1):
    ctx.log({"loss": lr}, step=1)
"""


def test_dry_run_says_what_it_would_start_and_what_differs_from_the_defaults(project: Project) -> None:
    config = project.function(FUNCTION, cluster={"ranks": 2, "gpus": 0}, checkpoint={"keep": 3}, env={"A_TOKEN": "x"})
    done = project("train", config, "--dry-run", "--set", "params.lr=0.5", rc=0)
    verdict, _, shown = done.stdout.partition("\n")
    assert verdict.startswith("# ok: would start 2 ranks on this machine")
    content: dict[str, Any] = yaml.safe_load(shown)
    hidden = content.pop("env")["A_TOKEN"]
    assert hidden != "x"
    assert content == {
        "workload": "work:train",
        "name": "work",
        "params": {"lr": 0.5},
        "cluster": {"ranks": 2, "gpus": 0},
    }
    assert not project.run_directories()


def test_dry_run_names_the_cluster(project: Project, shared_cluster: str) -> None:
    config = project.function(FUNCTION, cluster={"ranks": 1})
    done = project("train", config, "--cluster", shared_cluster, "--dry-run", rc=0)
    assert done.stdout.startswith(f"# ok: would start 1 rank on {shared_cluster}")


@pytest.mark.long
def test_best_configuration_of_a_sweep_is_what_was_chosen(project: Project, shared_cluster: str) -> None:
    sweep = {"space": {"params.lr": [0.25, 0.5]}, "search": "grid", "metric": "loss"}
    config = project.function(FUNCTION, sweep=sweep)
    project("sweep", config, "--cluster", shared_cluster, rc=0)
    (best,) = project.folder.glob("runs/*/best.yaml")
    content: dict[str, Any] = yaml.safe_load(best.read_text())
    assert content.pop("cluster").items() >= {"ranks": 1}.items()
    assert content == {
        "workload": "work:train",
        "name": "work",
        "params": {"lr": 0.25},
        "retrain": {"model": "work", "gate": [{"metric": "loss"}]},
    }
    project("train", best, "--dry-run", rc=0)
