"""The model that a run begins with: what it looks like, and the weights that it starts from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch import nn

from ddptrain.config.wording import shown
from ddptrain.file_ops import sha256
from ddptrain.storage.download import CannotFetch, NotReached, Progress, fetch_file
from ddptrain.workloads.images.model.labels import matches
from ddptrain.workloads.images.model.models import MEAN, STD, build, describe, wrong_size
from ddptrain.workloads.images.model.preflight import (
    BadWeights,
    WeightsNotReached,
    is_weights_name,
    is_weights_url,
    labels_of,
    options_for,
    weights_path,
)
from ddptrain.workloads.images.model.weights import load, named, read
from ddptrain.workloads.images.params import ImagesParams

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext


def described_model(settings: ImagesParams, classes: Sequence[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """The description of the model that the parameters ask for; see `models.describe`.

    `tell` gets a line for each class whose name is not quite that of its output.

    Raises: UsageError where the label map can't be read, is of another model, or is not certain; BadWeights for an
    unknown name.
    """
    mean: Sequence[float] = MEAN
    std: Sequence[float] = STD
    if settings.weights is not None and is_weights_name(settings.weights):
        known = named(settings.architecture, settings.weights)
        mean, std = known.mean, known.std
    labels = labels_of(settings)
    if labels is None:
        return describe(settings.architecture, settings.image_size, classes, mean=mean, std=std)
    found = matches(classes, labels)
    for one in found:
        if one.remark:
            tell(f"{shown(one.name)}: {one.remark}")
    return describe(
        settings.architecture,
        settings.image_size,
        classes,
        outputs=[one.label.output for one in found],
        output_names=labels.names,
        mean=mean,
        std=std,
    )


def built_model(model_config: dict[str, Any]) -> nn.Module:
    """The model of a description, which has been shown an image of its size.

    Raises: UsageError where it can't take such images.
    """
    model = build(model_config)
    size = model_config["image_size"]
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, size, size))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise wrong_size(model_config, error) from None
    return model.train()


def begin_with_weights(
    ctx: RankContext, settings: ImagesParams, model: nn.Module, model_config: dict[str, Any]
) -> None:
    """Loads params.weights into the model, on all ranks; rank 0 says what was loaded, and what was not.

    Raises: BadWeights where they can't be had, read, or are of another model.
    """
    if settings.weights is None:
        return
    path = weights_file(
        settings,
        settings.weights,
        lambda done, total: ctx.progress(done, total, unit="MB"),
        lambda line: print(line, flush=True),
    )
    keep_head = settings.label_map is not None
    # That torchvision's outputs are as many as the classes is chance, in a file of one's own they may well be the same.
    new_head = not keep_head and is_weights_name(settings.weights)
    others = load(model, read(path), model_config, str(path), keep_head=keep_head, new_head=new_head)
    if ctx.rank == 0:
        print(f"weights: {path}{_replaced(others, model_config['n_outputs'])}", flush=True)
        _tell_size(settings, settings.weights)


def _replaced(others: int | None, n_outputs: int) -> str:
    if others is None:
        return ""
    hint = " (params.label_map keeps it)" if others == n_outputs else ""
    return f"; their head of {others:,} outputs is replaced by a new one of {n_outputs:,}{hint}"


def _tell_size(settings: ImagesParams, weights: str) -> None:
    """A line where the weights are known to be made for images of another size."""
    size = named(settings.architecture, weights).image_size if is_weights_name(weights) else settings.image_size
    if size != settings.image_size:
        told = f"these weights were made for images of {size} pixels, params.image_size is {settings.image_size}"
        print(told, flush=True)


def weights_file(settings: ImagesParams, weights: str, progress: Progress, tell: Callable[[str], None]) -> Path:
    """The file with the weights, on this host. Raises: BadWeights, WeightsNotReached."""
    if not is_weights_url(weights) and not is_weights_name(weights):
        return weights_path(weights)
    url = named(settings.architecture, weights).url if is_weights_name(weights) else weights
    name = PurePosixPath(urlsplit(url).path).name
    if not is_weights_name(weights):
        name = f"ddptrain-{sha256(url.encode()).hexdigest()[:16]}-{name}"
    try:
        return fetch_file(
            url,
            Path(torch.hub.get_dir()) / "checkpoints" / name,  # where torchvision looks, and puts them
            options_for(settings, url),
            progress=progress,
            tell=tell,
            check_name=is_weights_name(weights),
        )
    except CannotFetch as error:
        what = f"the weights {weights} of {settings.architecture}" if is_weights_name(weights) else "the weights"
        kind = WeightsNotReached if isinstance(error, NotReached) else BadWeights
        raise kind(
            f"{what} can't be had: {error}; fetch the file elsewhere and name it, as params.weights: FILE, or begin at "
            "random, with params.weights: null"
        ) from None
