"""Replicas of a model that is divided among the ranks of each host."""

from __future__ import annotations

import json
import textwrap

import pytest

from tests.conftest import Cli


@pytest.mark.long
def test_replicas_begin_equal_from_the_meta_device(run_cli: Cli, shared_cluster: str) -> None:
    """Four ranks stand for two hosts of two ranks. Ranks of a user have seeds of their own."""
    code = """
        import torch
        import torch.distributed as dist
        from ddptrain.rank.prepare import shard_model

        def train(ctx):
            torch.manual_seed(100 + ctx.rank)
            with torch.device("meta"):
                model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
            before = torch.get_rng_state()
            settings = {"strategy": "hybrid", "hosts": 2, "ranks_on_host": 2}
            model = shard_model(model, ctx.device, settings, None)
            assert torch.equal(torch.get_rng_state(), before)
            own = model[0].weight.to_local().flatten()
            parts = [torch.empty_like(own) for _ in range(4)]
            dist.all_gather(parts, own)
            assert torch.equal(parts[0], parts[2]) and torch.equal(parts[1], parts[3]), parts
            assert not torch.equal(parts[0], parts[1])
    """
    (run_cli.folder / "work.py").write_text(textwrap.dedent(code))
    config = {"workload": "work:train", "cluster": {"address": shared_cluster, "ranks": 4}}
    (run_cli.folder / "work.yaml").write_text(json.dumps(config))
    done = run_cli("train", "work.yaml")
    assert done.rc == 0, done.stderr + done.stdout
