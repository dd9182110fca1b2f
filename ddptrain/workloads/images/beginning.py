"""The model that a run begins with: what it looks like, and the weights that it starts from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch import nn

from ddptrain.workloads.images.fetching import CannotFetch, fetch_file, is_url
from ddptrain.workloads.images.labelfile import read_labels
from ddptrain.workloads.images.labels import matches
from ddptrain.workloads.images.models import MEAN, STD, build, describe, wrong_size
from ddptrain.workloads.images.params import WEIGHTS_NAME, ImagesParams
from ddptrain.workloads.images.store import fetch
from ddptrain.workloads.images.weights import BadWeights, load, named, read

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext


def described_model(settings: ImagesParams, classes: Sequence[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """The description of the model that the parameters ask for; see `models.describe`.

    `tell` gets a line for each class whose name is not quite that of its output.

    Raises: UsageError where the label map can't be read, or is not certain; BadWeights for an unknown name.
    """
    mean: Sequence[float] = MEAN
    std: Sequence[float] = STD
    if settings.weights is not None and _is_name(settings.weights):
        known = named(settings.architecture, settings.weights)
        mean, std = known.mean, known.std
    if settings.label_map is None:
        return describe(settings.architecture, settings.image_size, classes, mean=mean, std=std)
    labels = read_labels(settings.label_map, _reader(settings, settings.label_map))
    found = matches(classes, labels)
    for one in found:
        if one.remark:
            tell(f"{one.name}: {one.remark}")
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
    path = _weights_file(ctx, settings, settings.weights)
    keep_head = settings.label_map is not None
    others = load(model, read(path), model_config, str(path), keep_head=keep_head)
    replaced = ""
    if others is not None:
        replaced = f"; their head of {others:,} outputs is replaced by a new one of {model_config['n_outputs']:,}"
    if ctx.rank == 0:
        print(f"weights: {path}{replaced}", flush=True)


def _weights_file(ctx: RankContext, settings: ImagesParams, weights: str) -> Path:
    """The file with the weights, on this host."""
    if not is_url(weights) and not _is_name(weights):
        return _local(weights)
    url = named(settings.architecture, weights).url if _is_name(weights) else weights
    name = PurePosixPath(urlsplit(url).path).name
    if not _is_name(weights):
        name = f"ddptrain-{hashlib.sha256(url.encode()).hexdigest()[:16]}-{name}"
    try:
        return fetch_file(
            url,
            Path(torch.hub.get_dir()) / "checkpoints" / name,  # where torchvision looks, and puts them
            _options_for(settings, url),
            progress=lambda done, total: ctx.progress(done, total, unit="MB"),
            tell=lambda text: print(text, flush=True),
            check_name=_is_name(weights),
        )
    except CannotFetch as error:
        what = f"the weights {weights} of {settings.architecture}" if _is_name(weights) else "the weights"
        raise BadWeights(
            f"{what} can't be had: {error}; fetch the file elsewhere and name it, as params.weights: FILE, or begin at "
            "random, with params.weights: null"
        ) from None


def _local(weights: str) -> Path:
    path = Path(weights).expanduser()
    if path.is_dir():
        raise BadWeights(f"{path} is a folder: name the file in it, as model.safetensors, as params.weights")
    if not path.exists():
        raise BadWeights(
            f"there are no weights {path.absolute()}: params.weights is a file's path, seen from each rank"
        )
    return path


def _is_name(weights: str) -> bool:
    return WEIGHTS_NAME.fullmatch(weights) is not None


def _reader(settings: ImagesParams, where: str) -> Any:
    return (lambda url: fetch(url, _options_for(settings, url))) if is_url(where) else None


def _options_for(settings: ImagesParams, url: str) -> dict[str, Any]:
    """The options of the source go for what lies in the same kind of store."""
    same = url.partition("://")[0].lower() == settings.source.partition("://")[0].lower()
    return dict(settings.source_options) if same else {}
