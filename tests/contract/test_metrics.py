"""A metric has one value, whoever is asked: the mean over the ranks that logged it."""

from __future__ import annotations

import csv
from typing import Any

import pytest

from tests.contract.conftest import Project, events

CODE = """
    import torch

    def train(ctx, log=True, values=(1.0, 3.0)):
        model = ctx.prepare(torch.nn.Linear(1, 1))
        for step in (1, 2):
            metrics = {"loss": values[ctx.rank]}
            if log:
                ctx.log(metrics, step=step)
            ctx.checkpoint(model=model, step=step, metrics=metrics)
"""
CHECKPOINT = {"every_epochs": None, "every_steps": 1, "metric": "loss"}


@pytest.mark.parametrize("log", [True, False], ids=["logged", "only saved"])
def test_every_view_has_the_mean_over_the_ranks(project: Project, shared_cluster: str, log: bool) -> None:
    config = project.function(CODE, checkpoint=CHECKPOINT, params={"log": log})
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", "--output", "json", rc=0)
    last: dict[str, Any] = events(done.stdout)[-1]
    assert (last["last_metrics"], last["best"]["value"]) == ({"loss": 2.0}, 2.0)
    project("results", "export", "latest", "--output", "exported", rc=0)
    with (project.folder / "exported" / "runs.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (float(row["last(loss)"]), float(row["best(loss)"])) == (2.0, 2.0)
    if log:
        assert "loss, mean of 2 ranks: 2" in project("results", "compare", "latest", rc=0).stdout


def test_last_of_equally_good_checkpoints_is_the_best(project: Project, shared_cluster: str) -> None:
    config = project.function(CODE, checkpoint=CHECKPOINT)
    project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=0)
    assert project.record()["best"]["step"] == 2
