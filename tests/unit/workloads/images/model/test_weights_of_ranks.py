"""Ranks of two hosts that have different files of weights at the same path."""

from __future__ import annotations

import json
import textwrap

import pytest

from tests.conftest import Cli


@pytest.mark.long
def test_pretrained_weights_are_those_of_rank_0(run_cli: Cli, shared_cluster: str) -> None:
    """Two files stand for the two hosts."""
    code = """
        import torch
        import torch.distributed as dist
        from safetensors.torch import save_file
        from ddptrain.workloads.images.model import begin_with_weights, built_model, described_model
        from ddptrain.workloads.images.params import ImagesParams

        def train(ctx):
            path = f"{ctx.rank}.safetensors"
            settings = ImagesParams(architecture="small_cnn", image_size=16, weights=path)
            described = described_model(settings, ["a", "b"])
            torch.manual_seed(ctx.rank)
            save_file(built_model(described).state_dict(), path)
            model = ctx.prepare(built_model(described))
            begin_with_weights(ctx, settings, model.module, described)
            for name, value in model.state_dict().items():
                first = value.clone()
                dist.broadcast(first, 0)
                assert torch.equal(first, value), name
    """
    (run_cli.folder / "work.py").write_text(textwrap.dedent(code))
    config = {"workload": "work:train", "cluster": {"address": shared_cluster, "ranks": 2}}
    (run_cli.folder / "work.yaml").write_text(json.dumps(config))
    done = run_cli("train", "work.yaml")
    assert done.rc == 0, done.stderr + done.stdout
