"""Ranks that exchange no gradients train one model each: the run says so."""

from __future__ import annotations

import pytest

from tests.contract.conftest import Project, lines

WORK = """
    import torch
    import torch.distributed as dist


    def train(ctx, exchange="", steps=32, evaluates=False):
        model = torch.nn.Linear(4, 1)
        if exchange == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        if exchange == "prepare":
            model = ctx.prepare(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            loss = model(torch.ones(8, 4)).square().mean()
            ctx.mean(loss)
            if evaluates:
                continue
            loss.backward()
            if exchange == "own":
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
"""
WARNING = "in 30 steps of the optimizer the ranks have exchanged no gradients: each rank trains alone"


def warnings(project: Project, cluster: str, ranks: int, **params: object) -> list[str]:
    config = project.function(WORK, params=params)
    project("train", config, "--cluster", cluster, "--ranks", str(ranks), rc=0)
    (run,) = project.run_directories()
    notes = (event for event in lines(run / "events.jsonl") if event["event"] == "note" and event["level"] == "warning")
    return [note["message"] for note in notes]


def test_ranks_that_train_alone_are_warned_of_once(project: Project, shared_cluster: str) -> None:
    (warning,) = warnings(project, shared_cluster, 2, steps=70)
    assert warning.startswith(WARNING) and "ctx.prepare(model)" in warning


@pytest.mark.parametrize(
    ("ranks", "params"),
    [
        (2, {"exchange": "ddp"}),
        pytest.param(2, {"exchange": "prepare"}, marks=pytest.mark.long),
        (2, {"exchange": "own"}),
        (2, {"evaluates": True, "steps": 70}),
        pytest.param(2, {"steps": 30}, marks=pytest.mark.long),
        pytest.param(1, {}, marks=pytest.mark.long),
    ],
)
def test_exchange_in_any_form_and_a_rank_alone_are_no_warning(
    project: Project, shared_cluster: str, ranks: int, params: dict[str, object]
) -> None:
    assert warnings(project, shared_cluster, ranks, **params) == []


def test_script_is_never_warned_of(project: Project, shared_cluster: str) -> None:
    project.write(
        "train.py",
        """
        import torch

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(70):
            model(torch.ones(8, 4)).square().mean().backward()
            optimizer.step()
        """,
    )
    done = project("run", "--cluster", shared_cluster, "--ranks", "2", "train.py", rc=0)
    assert WARNING not in done.stderr + done.stdout
