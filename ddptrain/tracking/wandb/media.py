"""Converts images, tables and models to wandb's objects."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image  # noqa: F401  # wandb would import it later, maybe while the process forks
import wandb

from ddptrain.file_ops import entries, hash_file, publish
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


def to_table_artifact(item: items.Table, max_rows: int, run_id: str, suffix: str) -> wandb.Artifact:
    """Return an artifact `<table>_<run>` with a copy of the table.

    An artifact that shares the logged table would refer to another artifact, which the server may not have yet.
    """
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


@contextmanager
def shared_image_copies(table: items.Table, max_rows: int) -> Iterator[None]:
    """Replace the copies of a table's images that wandb makes in the block by hard links to the images.

    wandb copies each image into every artifact that shows it. Only for an offline run: an online run deletes a copy
    once it is sent, maybe within the block.
    """
    folder = Path(os.environ.get("WANDB_DATA_DIR", "")) / "artifacts" / "staging"
    before = {*entries(folder)}
    yield
    with suppress(OSError):  # the copies stay
        images = [value.path for row in table.rows[:max_rows] for value in row if isinstance(value, items.Image)]
        known: dict[tuple[int, str], Path] = {hash_file(path): path for path in images}
        for copy in {*entries(folder)} - before:
            if _is_complete(copy) and (content := hash_file(copy)) in known:
                known[content] = _replace_by_link(copy, known[content])


def _is_complete(copy: Path) -> bool:
    """Return whether wandb has finished a copy, which it then makes read-only. Other ranks write copies there, too."""
    mode = copy.lstat().st_mode
    return stat.S_ISREG(mode) and stat.S_IMODE(mode) == stat.S_IRUSR


def _replace_by_link(copy: Path, original: Path) -> Path:
    """Replace a copy by a hard link.

    Return the file for further links: `original`, or `copy` if it is on another disk.
    """
    link = copy.with_name(f"{copy.name}-{secrets.token_hex(4)}")
    try:
        os.link(original, link)
    except OSError:  # another disk
        return copy
    publish(link, copy)
    return original
