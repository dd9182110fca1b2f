"""Ranks draw random numbers as independent processes do, although a warm rank is a fork; a seed of the user wins."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contract.conftest import Project

# Draws from each generator that a process has from the beginning, and reads 10 shuffled batches of 16 of 3,000 samples.
DRAW = """
import json, os, random
import multiprocessing, numpy, torch
from sympy.core.random import rng
from torch.utils.data import DataLoader, TensorDataset

def draw(seed=None):
    if seed is not None:
        random.seed(seed), numpy.random.seed(seed), torch.manual_seed(seed), rng.seed(seed)
    drawn = {
        "random": random.random(), "numpy": numpy.random.rand(), "torch": torch.rand(1).item(), "sympy": rng.random(),
        "generator": numpy.random.default_rng(seed).random(), "torch generator": torch.Generator().seed(),
        "key": multiprocessing.current_process().authkey.hex(),
    }
    loader = DataLoader(TensorDataset(torch.arange(3000)), batch_size=16, shuffle=True)
    drawn["samples"] = [int(number) for _, (batch,) in zip(range(10), loader) for number in batch]
    with open(f"{os.environ['DDPTRAIN_RUN_ID']}-{os.environ['RANK']}.json", "w") as file:
        json.dump(drawn, file)
"""
COLD = ("--set", 'env.MALLOC_ARENA_MAX="2"')


def drawn_by(project: Project, cluster: str, kind: str, *options: str, seed: int | None = None) -> list[dict[str, Any]]:
    """What the two ranks of a new run have drawn."""
    project.write("drawing.py", DRAW)
    before = set(project.folder.glob("*.json"))
    where = ("--cluster", cluster, "--ranks", "2", *options)
    if kind == "script":
        project.write("script.py", f"import drawing\ndrawing.draw({seed})\n")
        project("run", *where, "script.py", rc=0)
    else:
        config = project.function(f"import drawing\n\ndef train(ctx):\n    drawing.draw({seed})\n")
        project("train", config, *where, rc=0)
    new = sorted(set(project.folder.glob("*.json")) - before)
    assert len(new) == 2
    return [json.loads(path.read_text()) for path in new]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("script", ()),
        pytest.param("function", (), marks=pytest.mark.long),
        pytest.param("script", COLD, marks=pytest.mark.long),
    ],
    ids=["script", "function", "cold"],
)
def test_ranks_and_runs_draw_different_numbers(
    project: Project, shared_cluster: str, kind: str, options: tuple[str, ...]
) -> None:
    drawn = [each for _ in range(2) for each in drawn_by(project, shared_cluster, kind, *options)]
    for name in drawn[0]:
        values = {json.dumps(each[name]) for each in drawn}
        assert len(values) == 4, f"{name}: two ranks or two runs have drawn the same"
    # 311 on average; the second rank must not read the samples of the first.
    assert len({*drawn[0]["samples"], *drawn[1]["samples"]}) > 280


def test_a_seed_of_the_user_gives_the_same_numbers_on_every_rank(project: Project, shared_cluster: str) -> None:
    one, other = drawn_by(project, shared_cluster, "script", seed=7)
    for each in (one, other):
        del each["key"], each["torch generator"]  # they have no seed of the user
    assert one == other


def test_numbers_continue_after_a_resume_where_the_checkpoint_was(project: Project, shared_cluster: str) -> None:
    code = """
        import random
        import numpy, torch

        def train(ctx):
            model = torch.nn.Linear(1, 1)
            resumed = ctx.resume(model=model)
            if resumed is None:
                ctx.checkpoint(model=model, step=1)
            numbers = random.random(), numpy.random.rand(), torch.rand(1).item()
            with open(f"rank-{ctx.rank}", "a") as file:
                print(*numbers, file=file)
            torch.distributed.barrier()  # both have written
            if resumed is None:
                raise RuntimeError("the first attempt fails")
    """
    config = project.function(code, checkpoint={"every_steps": 1, "asynchronous": False}, failure={"max_restarts": 1})
    project("train", config, "--cluster", shared_cluster, "--ranks", "2", rc=0)
    ranks = [(project.folder / f"rank-{rank}").read_text().splitlines() for rank in range(2)]
    for first, second in ranks:
        assert first == second
    assert ranks[0] != ranks[1]
