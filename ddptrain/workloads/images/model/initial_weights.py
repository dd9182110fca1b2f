"""The model at the start of a run: its description, its initial weights, and a check that the two fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, distributed, nn

from ddptrain.config.wording import shorten
from ddptrain.file_ops import sha256
from ddptrain.protocol.starting_weights import StartingWeights, names_model, weights_in
from ddptrain.redact import hide_credentials
from ddptrain.storage.download import DownloadFailed, Progress, ServerUnreachable, fetch_file
from ddptrain.workloads.images.model.build_model import MEAN, STD, build, describe, outline, wrong_size
from ddptrain.workloads.images.model.labels import Labels, matches
from ddptrain.workloads.images.model.preflight import (
    BadWeights,
    WeightsNotReached,
    check_weights_file,
    is_weights_name,
    is_weights_url,
    labels_of,
    options_for,
    weights_path,
)
from ddptrain.workloads.images.model.pretrained_weights import find_pretrained, fit, read
from ddptrain.workloads.images.params import ImagesParams
from ddptrain.workloads.saved_model import with_module_versions

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext

_REPORT_EVERY_S = 10.0


def described_model(settings: ImagesParams, classes: Sequence[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """Return the description of the model that the parameters select; see build_model.describe.

    `tell` gets a line for each class whose name differs from that of its output.

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
    matched = matches(classes, labels)
    for match in matched:
        if match.remark:
            tell(f"{shorten(match.name)}: {match.remark}")
    return describe(
        settings.architecture,
        settings.image_size,
        classes,
        outputs=[match.label.output for match in matched],
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
        settings,
        settings.weights,
        lambda done, total: ctx.progress(done, total, unit="MB"),
        lambda line: print(line, flush=True),
        ctx.inputs,
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


def weights_file(
    settings: ImagesParams,
    weights: str,
    progress: Progress,
    tell: Callable[[str], None],
    inputs: Path | None = None,
) -> Path:
    """Return the local file with the weights, downloaded if needed; those of a model of the registry are in `inputs`.

    Raises: BadWeights, WeightsNotReached; UsageError if the weights of a model are missing.
    """
    if names_model(weights):
        return weights_in(inputs)
    if not is_weights_url(weights) and not is_weights_name(weights):
        return weights_path(weights)
    url = find_pretrained(settings.architecture, weights).url if is_weights_name(weights) else weights
    name = PurePosixPath(urlsplit(url).path).name
    if not is_weights_name(weights):
        name = f"ddptrain-{sha256(url.encode()).hexdigest()[:16]}-{name}"
    try:
        return fetch_file(
            url,
            Path(torch.hub.get_dir()) / "checkpoints" / name,  # the folder that torchvision uses
            options_for(settings, url),
            progress=progress,
            tell=tell,
            check_name=is_weights_name(weights),
        )
    except DownloadFailed as error:
        what = f"the weights {weights} of {settings.architecture}" if is_weights_name(weights) else "the weights"
        kind = WeightsNotReached if isinstance(error, ServerUnreachable) else BadWeights
        raise kind(
            f"{what} can't be fetched: {error}; fetch the file elsewhere and name it, as params.weights: FILE, or set "
            "params.weights: null for random ones"
        ) from None


def check_weights_fit(
    settings: ImagesParams,
    classes: Sequence[str],
    labels: Labels | None,
    tell: Callable[[str], None],
    inputs: Path | None = None,
) -> None:
    """Check that params.weights, a path or a URL, fits the model; passes if this host can't reach the URL.

    A URL is downloaded to the folder where the ranks of this host look for it.

    Raises: BadWeights; UsageError if the model does not support the image size.
    """
    weights = str(settings.weights)
    try:
        path = weights_file(settings, weights, _download_report(hide_credentials(weights), tell), tell, inputs)
    except WeightsNotReached as error:
        tell(f"{error} (the run starts nevertheless, because its ranks may be able to fetch them)")
        return
    if is_weights_url(weights):
        source = shorten(hide_credentials(weights), 300)
        state = _fetched(path, source)
    else:
        source = weights if names_model(weights) else shorten(str(path.absolute()), 300)
        state = read(path, source, lazily=True)
    names = None if labels is None else labels.names
    model_config = describe(settings.architecture, settings.image_size, classes, output_names=names)
    fit(outline(model_config), state, model_config, source, keep_head=labels is not None)


def _fetched(path: Path, source: str) -> Mapping[str, Tensor]:
    """Return the tensors of a downloaded file; it is deleted if it has none, so that a later run downloads it again."""
    try:
        check_weights_file(path, source)
        return read(path, source, lazily=True)
    except BadWeights:
        path.unlink(missing_ok=True)
        raise


def _download_report(what: str, tell: Callable[[str], None]) -> Progress:
    """Return a function that reports megabytes done, and in total if known, at intervals."""
    due = time.monotonic() + _REPORT_EVERY_S

    def progress(done: float, total: float | None) -> None:
        nonlocal due
        if time.monotonic() > due:
            due = time.monotonic() + _REPORT_EVERY_S
            tell(f"fetching {what}: {done:,.0f}{f' of {total:,.0f}' if total else ''} MB so far")

    return progress
