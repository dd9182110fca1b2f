"""What the ranks of an evaluation are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ddptrain.driver.evaluation_plan import RANK_FUNCTION, EvaluationPlan
from ddptrain.rank import evaluation


def test_ranks_are_told_the_checkpoints_and_where_they_are() -> None:
    checkpoints: Any = {
        name: SimpleNamespace(step=step, epoch=epoch, metrics={"loss": 1.0})
        for name, step, epoch in (("new", 7, 1.5), ("old", 3, None))
    }
    plan = EvaluationPlan("m:score", checkpoints, data="held.csv")
    assert plan.description == "new and old" and (plan.prepare, plan.request) == ("", {})
    params = {"width": 3}
    told = plan.rank_params(params, {"old": "/o", "new": "/n"})
    assert told == {
        "function": "m:score",
        "targets": [
            {"name": "new", "folder": "/n", "step": 7, "epoch": 1.5, "metrics": {"loss": 1.0}},
            {"name": "old", "folder": "/o", "step": 3, "epoch": None, "metrics": {"loss": 1.0}},
        ],
        "params": {"width": 3},
        "data": "held.csv",
    }
    assert told["params"] is not params
    assert EvaluationPlan("m:score", {}).rank_params({}, {})["data"] is None


def test_function_of_the_ranks_takes_what_they_are_told() -> None:
    assert f"{evaluation.__name__}:{evaluation.evaluate.__name__}" == RANK_FUNCTION
