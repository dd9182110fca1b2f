"""The loss on held-out names, exact over all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ddptrain.workloads.petnames.data import Rows
from ddptrain.workloads.petnames.model import CharacterModel, summed_nll

_ROWS_AT_ONCE = 1024


@torch.inference_mode()
def mean_nll(
    model: CharacterModel, rows: Rows, rank: int, world_size: int, seen: Callable[[], None] = lambda: None
) -> float:
    """Mean negative log likelihood, in nats, of every character and stop of `rows` given what precedes it.

    Every rank calls it with the same rows, scores its own part of them, and gets the mean over all. `seen` is called
    after each batch, as a sign of life.
    """
    was_training = model.training
    model.eval()
    own = rows.lengths.argsort(stable=True)[rank::world_size]  # by length: little padding
    total = torch.zeros(1, dtype=torch.float64)
    for index in own.split(_ROWS_AT_ONCE) if len(own) else ():  # more ranks than names: nothing to add
        inputs, targets = rows.batch(index)
        total += summed_nll(model(inputs), targets).double().cpu()
        seen()
    total = total.to(rows.symbols.device)
    dist.all_reduce(total)
    model.train(was_training)
    return float(total) / int(rows.n_targets.sum())
