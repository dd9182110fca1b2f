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

_MAX_SAMPLES = 1 << 16  # of a tensor, for a histogram: training needs the processor
_BINS = 64
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


def to_image(item: items.Image) -> wandb.Image:
    """The image; wandb copies its file when it is logged."""
    return wandb.Image(str(item.path), caption=item.caption or None)


def to_table(item: items.Table, max_rows: int) -> wandb.Table:
    """The first rows of a table, with their images."""
    rows = [[_cell(value) for value in row] for row in item.rows[:max_rows]]
    return wandb.Table(columns=list(item.columns), data=rows)


def _cell(value: Any) -> Any:
    if isinstance(value, items.Image):
        return to_image(value)
    return value.item() if isinstance(value, np.generic) else value


def to_table_artifact(item: items.Table, max_rows: int, run_id: str, suffix: str) -> wandb.Artifact:
    """The table as an artifact `<its name>_<run>`, with its own copy of the table.

    If it shared the table that is logged, it would refer to another artifact, which the server may not have yet.
    """
    artifact = wandb.Artifact(
        artifact_name(f"{item.name}_{run_id}{suffix}"), type=artifact_name(item.name), metadata={"step": item.step}
    )
    artifact.add(to_table(item, max_rows), artifact_name(item.name))
    return artifact


def artifact_name(text: str) -> str:
    """The text without the characters that W&B refuses in names."""
    return _NOT_IN_NAMES.sub("_", text)[:128]


def histograms(model: Any, watch: str) -> dict[str, wandb.Histogram]:
    """Histograms of a model's current "parameters", "gradients" or both ("all").

    The model is being trained meanwhile. No hooks are added to it, so an error of W&B cannot reach it.
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
    """Up to about 65,536 finite values of a tensor, as an array."""
    flat = tensor.detach().flatten()
    values = flat[:: max(1, flat.numel() // _MAX_SAMPLES)].float().cpu().numpy()
    return values[np.isfinite(values)]


@contextmanager
def shared_image_copies(table: items.Table, max_rows: int) -> Iterator[None]:
    """Replaces the copies of a table's images that wandb makes in the block by hard links to the images.

    wandb copies each image into every artifact that shows it. Only for an offline run: an online run deletes a copy
    once it is sent, maybe within the block.
    """
    folder = Path(os.environ.get("WANDB_DATA_DIR", "")) / "artifacts" / "staging"
    before = {*entries(folder)}
    yield
    with suppress(OSError):  # then they stay copies
        images = [value.path for row in table.rows[:max_rows] for value in row if isinstance(value, items.Image)]
        known: dict[tuple[int, str], Path] = {hash_file(path): path for path in images}
        for copy in {*entries(folder)} - before:
            if _is_complete(copy) and (content := hash_file(copy)) in known:
                known[content] = _replace_by_link(copy, known[content])


def _is_complete(copy: Path) -> bool:
    """Whether wandb has finished a copy: its last step is to make it read-only. Other ranks write there, too."""
    mode = copy.lstat().st_mode
    return stat.S_ISREG(mode) and stat.S_IMODE(mode) == stat.S_IRUSR


def _replace_by_link(copy: Path, original: Path) -> Path:
    """Returns the file that further copies can be linked to: the original, or the copy on another disk."""
    beside = copy.with_name(f"{copy.name}-{secrets.token_hex(4)}")
    try:
        os.link(original, beside)
    except OSError:  # another disk
        return copy
    publish(beside, copy)
    return original
