"""A workload that looks at its inputs and does no more."""

from __future__ import annotations

import hashlib
import os

import torch

from ddptrain import RankContext
from ddptrain.storage.store import open_store
from ddptrain.workloads.images.data.manifest import Manifest
from ddptrain.workloads.images.params import ImagesParams


def train(ctx: RankContext, **params: object) -> None:
    """Read an image, print what is in the list, and fail where FAIL is set."""
    assert ctx.inputs is not None
    manifest = Manifest.read(ctx.inputs)
    data = open_store(manifest.location(ImagesParams(**params))).get(manifest.keys[ctx.rank])
    print("seen", hashlib.sha256(repr(manifest).encode()).hexdigest(), len(data), flush=True)
    torch.distributed.barrier()
    if os.environ.get("FAIL") and ctx.rank == 0:
        raise ValueError("as asked")
