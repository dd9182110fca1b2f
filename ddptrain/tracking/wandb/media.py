"""Pictures, tables, checkpoints and histograms, as W&B has them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image  # noqa: F401  # wandb asks for it later, when a process may be about to fork
import wandb

from ddptrain.tracking import items

_MOST_SAMPLED = 1 << 16  # numbers of a tensor that a histogram is made from: training has the processor
_BINS = 64
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


def picture(item: items.Image) -> wandb.Image:
    """A picture, which wandb copies when it is logged."""
    return wandb.Image(str(item.path), caption=item.caption or None)


def table(item: items.Table, most_rows: int) -> wandb.Table:
    """The first `most_rows` rows of a table, with its pictures."""
    rows = [[_cell(value) for value in row] for row in item.rows[:most_rows]]
    return wandb.Table(columns=list(item.columns), data=rows)


def pictures(item: items.Table, most_rows: int) -> list[Path]:
    """The files of the pictures in the first `most_rows` rows."""
    return [value.path for row in item.rows[:most_rows] for value in row if isinstance(value, items.Image)]


def _cell(value: Any) -> Any:
    if isinstance(value, items.Image):
        return picture(value)
    if isinstance(value, np.generic):
        return value.item()
    return value


def table_artifact(item: items.Table, most_rows: int, run_id: str, suffix: str) -> wandb.Artifact:
    """The table as an artifact `<its name>_<run>`, with pictures of its own.

    One that shared the table that is logged would refer to another artifact, which a server has to know by then.
    """
    name = artifact_name(f"{item.name}_{run_id}{suffix}")
    artifact = wandb.Artifact(name, type=artifact_name(item.name), metadata={"step": item.step})
    artifact.add(table(item, most_rows), artifact_name(item.name))
    return artifact


def artifact_name(text: str) -> str:
    """The text as a name that W&B takes."""
    return _NOT_IN_NAMES.sub("_", text)[:128]


def histograms(model: Any, what: str) -> dict[str, wandb.Histogram]:
    """Histograms of a model's parameters, gradients or both (`what` is "all"), as they are at this moment.

    The model trains on meanwhile: nothing is hooked into it, so that no fault of W&B can reach it.
    """
    found: dict[str, wandb.Histogram] = {}
    for name, parameter in model.named_parameters():
        if what in {"parameters", "all"}:
            found |= _histogram(f"parameters/{name}", parameter)
        if what in {"gradients", "all"}:
            found |= _histogram(f"gradients/{name}", parameter.grad)
    return found


def _histogram(name: str, tensor: Any) -> Mapping[str, wandb.Histogram]:
    if tensor is None:
        return {}
    flat = tensor.detach().flatten()
    flat = flat[:: max(1, flat.numel() // _MOST_SAMPLED)]
    values = flat.float().cpu().numpy()
    values = values[np.isfinite(values)]
    return {name: wandb.Histogram(np_histogram=np.histogram(values, bins=_BINS))} if values.size else {}
