"""The model at the start of a run: its description, its initial weights, and a check that the two fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from ddptrain.config.wording import shorten
from ddptrain.protocol.starting_weights import StartingWeights, names_model, weights_in
from ddptrain.storage.download import DownloadFailed, Progress, fetch_file
from ddptrain.workloads.images.model.build_model import MEAN, STD, build, describe, outline, wrong_size
from ddptrain.workloads.images.model.labels import Labels, outputs_of
from ddptrain.workloads.images.model.preflight import (
    BadWeights,
    is_weights_name,
    labels_of,
    weights_path,
)
from ddptrain.workloads.images.model.pretrained_weights import find_pretrained, fit, read
from ddptrain.workloads.images.params import ImagesParams
from ddptrain.workloads.saved_model import with_module_versions

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext


def described_model(settings: ImagesParams, classes: Sequence[str]) -> dict[str, Any]:
    """Return the description of the model that the parameters select; see build_model.describe.

    Raises: UsageError if the label map is unreadable, ambiguous or of another model; BadWeights for an unknown name.
    """
    mean: Sequence[float] = MEAN
    std: Sequence[float] = STD
    if settings.weights is not None and is_weights_name(settings.weights):
        known = find_pretrained(settings.architecture, settings.weights)
        mean, std = known.mean, known.std
    labels = labels_of(settings)
    if labels is None:
        return describe(settings.architecture, settings.image_size, classes, mean=mean, std=std)
    return describe(
        settings.architecture,
        settings.image_size,
        classes,
        outputs=outputs_of(classes, labels),
        output_names=labels.names,
        mean=mean,
        std=std,
    )


def built_model(model_config: dict[str, Any]) -> nn.Module:
    """Build the model of a description and check it with an image of its size. Raises UsageError if that fails."""
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
    """Load params.weights into the model. All ranks must call it, and have those of rank 0 then, which prints them.

    Raises BadWeights if they can't be fetched or read, or are of another model.
    """
    if settings.weights is None:
        return
    path = weights_file(
        settings.architecture, settings.weights, ctx.inputs, lambda done, total: ctx.progress(done, total, unit="MB")
    )
    keep_head = settings.label_map is not None
    # Torchvision's weights have other classes even if their number is equal; a user's own weights may have the same.
    other_classes = is_weights_name(settings.weights) or _has_other_classes(settings, model_config, ctx.inputs)
    new_head = not keep_head and other_classes
    fitting, others = fit(model, read(path), model_config, str(path), keep_head=keep_head, new_head=new_head)
    model.load_state_dict(with_module_versions(model, fitting), strict=False)
    _share_weights(model)  # hosts may have different files at this path, and DDP exists already
    if ctx.rank == 0:
        source = settings.weights if names_model(settings.weights) else path
        print(f"weights: {source}{_replaced(others, model_config['n_outputs'])}", flush=True)
        _tell_size(settings, settings.weights)


def _share_weights(model: nn.Module) -> None:
    """Copy the weights of rank 0 to all ranks."""
    for weight in (*model.parameters(), *model.buffers()):
        whole = weight.detach().contiguous()
        distributed.broadcast(whole, 0)
        weight.detach().copy_(whole)


def _has_other_classes(settings: ImagesParams, model_config: Mapping[str, Any], inputs: Path | None) -> bool:
    """Return whether the weights are of a model of the registry that was trained on other classes."""
    if inputs is None or not names_model(settings.weights):
        return False
    known = StartingWeights.read(inputs)
    return known is not None and bool(known.classes) and list(known.classes) != list(model_config["classes"])


def _replaced(others: int | None, n_outputs: int) -> str:
    if others is None:
        return ""
    hint = " (params.label_map keeps it)" if others == n_outputs else ""
    return f"; their head of {others:,} outputs is replaced by a new one of {n_outputs:,}{hint}"


def _tell_size(settings: ImagesParams, weights: str) -> None:
    """Print a line if the weights were trained with another image size."""
    size = (
        find_pretrained(settings.architecture, weights).image_size if is_weights_name(weights) else settings.image_size
    )
    if size != settings.image_size:
        text = f"these weights were made for images of {size} pixels, params.image_size is {settings.image_size}"
        print(text, flush=True)


def weights_file(architecture: str, weights: str, inputs: Path | None, progress: Progress) -> Path:
    """Return the local file with the weights: a path, a model of the registry in `inputs`, or torchvision's, fetched.

    Raises BadWeights; UsageError if the weights of a model are missing.
    """
    if names_model(weights):
        return weights_in(inputs)
    if not is_weights_name(weights):
        return weights_path(weights)
    url = find_pretrained(architecture, weights).url
    path = Path(torch.hub.get_dir()) / "checkpoints" / PurePosixPath(url).name  # the folder that torchvision uses
    try:
        return fetch_file(url, path, progress=progress, tell=lambda line: print(line, flush=True))
    except DownloadFailed as error:
        raise BadWeights(
            f"the weights {weights} of {architecture} can't be fetched: {error}; fetch the file elsewhere and name it, "
            "as params.weights: FILE, or set params.weights: null for random ones"
        ) from None


def check_weights_fit(
    settings: ImagesParams, weights: str, classes: Sequence[str], labels: Labels | None, inputs: Path
) -> None:
    """Check that weights, a path or a model of the registry, fit the model.

    Raises: BadWeights; UsageError if the model does not support the image size.
    """
    path = weights_in(inputs) if names_model(weights) else weights_path(weights)
    source = weights if names_model(weights) else shorten(str(path.absolute()), 300)
    names = None if labels is None else labels.names
    model_config = describe(settings.architecture, settings.image_size, classes, output_names=names)
    fit(outline(model_config), read(path, source, lazily=True), model_config, source, keep_head=labels is not None)
