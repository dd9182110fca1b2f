"""Converts images, tables and models to wandb's objects."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import PIL.Image  # noqa: F401  # wandb would import it later, maybe while the process forks
import wandb

from ddptrain.tracking import items

_MAX_SAMPLES = 1 << 16  # the most values of a tensor in a histogram: it must not take much CPU time from the training
_BINS = 64
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


def to_image(item: items.Image) -> wandb.Image:
    """Return the image; wandb copies its file when it is logged."""
    return wandb.Image(str(item.path), caption=item.caption or None)


def to_table(item: items.Table, max_rows: int) -> wandb.Table:
    """Return the first rows of a table, with their images."""
    rows = [[_cell(value) for value in row] for row in item.rows[:max_rows]]
    return wandb.Table(columns=list(item.columns), data=rows)


def _cell(value: Any) -> Any:
    if isinstance(value, items.Image):
        return to_image(value)
    return value.item() if isinstance(value, np.generic) else value


def to_table_artifact(item: items.Table, max_rows: int, run_id: str, rank: int) -> wandb.Artifact:
    """Return an artifact `<table>_<run>` with a copy of the table; `<table>_<run>_rank_<rank>` if it is not rank 0's.

    An artifact that shares the logged table would refer to another artifact, which the server may not have yet.
    """
    suffix = f"_rank_{rank}" if rank else ""
    artifact = wandb.Artifact(
        artifact_name(f"{item.name}_{run_id}{suffix}"), type=artifact_name(item.name), metadata={"step": item.step}
    )
    artifact.add(to_table(item, max_rows), artifact_name(item.name))
    return artifact


def artifact_name(text: str) -> str:
    """Return the text as a valid name of W&B, with "_" in place of other characters, at most 128 characters."""
    return _NOT_IN_NAMES.sub("_", text)[:128]


def histograms(model: Any, watch: str) -> dict[str, wandb.Histogram]:
    """Return histograms of a model's current values; `watch` is "parameters", "gradients" or "all".

    The model is being trained meanwhile. It gets no hooks, so errors of W&B do not affect training.
    """
    tensors: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if watch in {"parameters", "all"}:
            tensors[f"parameters/{name}"] = parameter
        if watch in {"gradients", "all"}:
            tensors[f"gradients/{name}"] = parameter.grad
    samples = {name: _sample(tensor) for name, tensor in tensors.items() if tensor is not None}
    return {
        name: wandb.Histogram(np_histogram=np.histogram(values, bins=_BINS))
        for name, values in samples.items()
        if values.size
    }


def _sample(tensor: Any) -> Any:
    """Return up to about 65,536 finite values of a tensor, as an array."""
    flat = tensor.detach().flatten()
    values = flat[:: max(1, flat.numel() // _MAX_SAMPLES)].float().cpu().numpy()
    return values[np.isfinite(values)]
