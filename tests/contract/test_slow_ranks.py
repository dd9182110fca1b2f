"""The rank for which the others wait in each step is named once: live, in events.jsonl, `results show`, on the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import Project, lines

STEPS = """
import time
import torch

class Model(torch.nn.Module):
    def __init__(self, pass_s):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.pass_s = pass_s

    def forward(self, x):
        time.sleep(self.pass_s)
        return self.layer(x)

def steps(wrap, pass_s, data_s):
    model = wrap(Model(pass_s))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(180):
        time.sleep(data_s)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""
FUNCTION = """
import steps

def train(ctx, pass_s: list[float]):
    steps.steps(ctx.prepare, pass_s[ctx.rank], 0.0)
"""
SCRIPT = """
import torch
from steps import steps

torch.distributed.init_process_group("gloo")
steps(torch.nn.parallel.DistributedDataParallel, 0.01, [0.0, 0.02][torch.distributed.get_rank()])
"""


def shown_and_recorded(project: Project, *command: str | Path) -> tuple[list[str], list[Any], str]:
    """Run; the lines about slow ranks, their records, and what is read afterwards: `results show` and the page."""
    project.write("steps.py", STEPS)
    done = project(*command, rc=0)
    (run,) = project.run_directories()
    events = [event for event in lines(run / "events.jsonl") if event["event"] == "slow_rank"]
    records = project.record()["slow_ranks"]
    assert [event["rank"] for event in events] == [record["rank"] for record in records]
    project("results", "report", "latest", "-o", "page.html", rc=0)
    listed = project("results", "show", "latest", rc=0).stdout
    shown = [line for line in done.stderr.splitlines() if "they wait for it" in line]
    page = (project.folder / "page.html").read_text()
    for line in shown:
        assert line[line.index("rank 1 on ") :] in listed and line[line.index("rank 1 on ") :] in page
    return shown, records, listed + page


def with_passes(project: Project, cluster: str, pass_s: list[float]) -> str:
    """The configuration of a function whose ranks sleep for so long in each forward pass."""
    return project.function(FUNCTION, cluster={"address": cluster, "ranks": 2}, params={"pass_s": pass_s})


def test_rank_with_a_slow_forward_pass_is_named(project: Project, shared_cluster: str) -> None:
    config = with_passes(project, shared_cluster, [0.01, 0.03])
    (line,), (slow,), _ = shown_and_recorded(project, "train", config)
    assert slow["rank"] == 1 and slow["own_s"] > 0.025 and slow["own_s"] - slow["median_s"] > 0.01
    assert line.endswith("they wait for it, because its forward and backward passes take longer")


@pytest.mark.long
def test_rank_of_a_script_with_slow_data_is_named(project: Project, shared_cluster: str) -> None:
    project.write("script.py", SCRIPT)
    (line,), (slow,), _ = shown_and_recorded(project, "run", "--cluster", shared_cluster, "--ranks", "2", "script.py")
    assert slow["rank"] == 1
    assert line.endswith("they wait for it, because its work between the passes, such as data, takes longer")


@pytest.mark.long
def test_no_rank_is_named_if_all_are_equally_slow(project: Project, shared_cluster: str) -> None:
    config = with_passes(project, shared_cluster, [0.03, 0.03])
    shown, records, read = shown_and_recorded(project, "train", config)
    assert (shown, records) == ([], []) and "they wait for it" not in read


def test_removed_fields_name_what_replaces_them(project: Project) -> None:
    config = project.function("def train(ctx): ...", failure={"slow": "replace", "slow_factor": 2.0})
    done = project("train", config, rc=2)
    assert "failure.slow: unknown key" in done.stderr and "failure.slow_factor: unknown key" in done.stderr
    assert "a slow rank is always named" in done.stderr
