"""The model registry as a person uses it: what is in use, what was refused and why, and the way back."""

from __future__ import annotations

import json
from typing import Any

from tests.contract.conftest import Project, events

FUNCTION = """
import torch

def train(ctx, loss: float = 1.0):
    ctx.checkpoint(model=torch.nn.Linear(2, 1), step=1, metrics={"val/loss": loss})
"""


def versions(project: Project) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(project("models", "show", "mine", "--json", rc=0).stdout)
    return found


def test_rejected_version_is_shown_with_the_reason(project: Project, shared_cluster: str) -> None:
    config = project.function(FUNCTION, cluster={"address": shared_cluster, "ranks": 1}, retrain={"model": "mine"})
    project("retrain", config, rc=0)
    rejected = project("retrain", config, "--set", "params.loss=2.0", "--output", "json", rc=7)
    (condition,) = events(rejected.stdout)[-1]["gate"]
    assert [each["rejected"] for each in versions(project)] == [None, condition["reason"]]
    for shown in (("show", "mine"), ("show", "mine@2"), ("show", "mine", "--history")):
        assert condition["reason"] in project("models", *shown, rc=0).stdout
    project("models", "promote", "mine", "2", rc=0)
    assert [each["rejected"] for each in versions(project)] == [None, None]
