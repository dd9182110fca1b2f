"""Scores a checkpoint of the pet-name model on held-out names, exactly over all ranks."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ddptrain.errors import UsageError
from ddptrain.rank.checkpoint.weights import load_checkpoint
from ddptrain.workloads.petnames.data import make_rows
from ddptrain.workloads.petnames.held_out import read_names
from ddptrain.workloads.petnames.model import CharacterModel
from ddptrain.workloads.petnames.train import mean_nll

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext
    from ddptrain.rank.evaluation import SavedCheckpoint


def evaluate(ctx: RankContext, checkpoint: SavedCheckpoint) -> dict[str, float]:
    """Return val/loss: nats for each character and stop of the names, for any architecture of the workload."""
    if ctx.inputs is None:
        raise UsageError("there are no names to evaluate on: start an evaluation with `ddptrain evaluate`")
    model = load_checkpoint(checkpoint.path, "petnames", CharacterModel.restored).to(ctx.device)
    config = model.config
    rows = make_rows(read_names(ctx.inputs), config.context, config.window, ctx.device)
    numbers = itertools.count(1)
    loss = mean_nll(model, rows, ctx.rank, ctx.world_size, lambda: ctx.progress(next(numbers), unit="batches"))
    return {"val/loss": loss}
