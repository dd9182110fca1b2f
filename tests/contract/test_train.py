"""What `ddptrain train` promises whatever it trains."""

from __future__ import annotations

from tests.contract.conftest import Project, events


def test_function_is_trained_by_every_rank(project: Project, shared_cluster: str) -> None:
    config = project.function("def train(ctx):\n    ctx.log({'loss': 1.0 + ctx.rank}, step=1)\n")
    done = project("train", config, "--cluster", shared_cluster, "--ranks", "2", "--output", "json", rc=0)
    last = events(done.stdout)[-1]
    assert (last["event"], last["status"], last["exit_code"]) == ("run_finished", "succeeded", 0)
    assert project.record()["world_size"] == 2
