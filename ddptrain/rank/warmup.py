"""The imports that every rank would otherwise pay for: torch, its distributed parts, and what the optimizer pulls in."""

from __future__ import annotations


def import_everything() -> None:
    """Import what ranks use, without running an op or touching a device.

    `torch._dynamo` is pulled in by the constructor of any optimizer (a second of CPU), `dask_pytorch_ddp.dispatch`
    brings the process group up, and `safetensors.torch` writes checkpoints. User code is never imported here.
    """
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.nn.parallel
    import torch.optim
    import torch.utils.data
    import torch.utils.data.distributed

    import ddptrain.rank.checkpoint
    import ddptrain.rank.context
    import ddptrain.rank.process

    _import_dispatch()
    assert torch is not None and ddptrain is not None  # imported for the forks to come


def _import_dispatch() -> None:
    import dask_pytorch_ddp.dispatch
    import safetensors.torch

    assert dask_pytorch_ddp is not None and safetensors is not None
