"""Models that `ctx.prepare` has prepared: copies of them, several of them, and how they begin."""

from __future__ import annotations

import pytest

from tests.contract.conftest import Project


def run(project: Project, cluster: str, code: str, ranks: int = 2, **config: object) -> None:
    """Train a function whose assertions are the test."""
    project("train", project.function(code, **config), "--cluster", cluster, "--ranks", str(ranks), rc=0)


@pytest.mark.parametrize(
    "prepare",
    [
        {},
        pytest.param({"precision": "bf16"}, marks=pytest.mark.long),
        {"precision": "fp16"},
        pytest.param({"activation_checkpointing": ["Sequential", "Linear"]}, marks=pytest.mark.long),
    ],
    ids=["plain", "bf16", "fp16", "activation checkpointing"],
)
def test_copies_compute_with_their_own_weights(project: Project, shared_cluster: str, prepare: object) -> None:
    code = """
        import copy

        import torch
        from torch.optim.swa_utils import AveragedModel

        def train(ctx):
            inner = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))
            torch.nn.init.ones_(inner[0].weight)
            model = ctx.prepare(inner)
            x = torch.ones(1, 2, requires_grad=True)
            for twin in (AveragedModel(model), copy.deepcopy(model), copy.deepcopy(inner)):
                for parameter in twin.parameters():
                    torch.nn.init.zeros_(parameter)
                assert twin(x).item() == 0, type(twin)
                assert model(x).item() == 2
            model(x).sum().backward()
            assert inner[0].weight.grad.tolist() == [[1, 1]]
    """
    run(project, shared_cluster, code, prepare=prepare)


def test_gradients_of_several_models_are_averaged_in_one_order(project: Project, shared_cluster: str) -> None:
    """The memory of the ranks is laid out so that a set of the two models has another order on each."""
    code = """
        import torch

        def train(ctx):
            kept = []
            for _ in range(200):
                one, other = (ctx.prepare(torch.nn.Linear(2, 1, bias=False), accumulate=2) for _ in range(2))
                wanted = (next(iter({one, other})) is one) == (ctx.rank == 0)
                if ctx.mean(float(wanted)) == 1:
                    break
                kept += [one, other, *([object() for _ in range(1 + 7 * ctx.rank)])]
            x = torch.full((1, 2), 1.0 if ctx.rank == 0 else 3.0)
            before = [model.module.weight.detach().clone() for model in (one, other)]
            for model, factor in ((one, 1), (other, 100)):
                ctx.backward(model(factor * x).sum())
            # The step ends after the first of two batches, in which DDP has not averaged the gradients.
            ctx.step(torch.optim.SGD([*one.parameters(), *other.parameters()], 0.1), last=True)
            for model, old, gradient in ((one, before[0], 2.0), (other, before[1], 200.0)):
                assert torch.allclose(old - model.module.weight, torch.full((1, 2), 0.1 * gradient), rtol=1e-3)
    """
    run(project, shared_cluster, code)
