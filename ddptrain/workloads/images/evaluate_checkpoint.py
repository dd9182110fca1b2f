"""Scores a checkpoint of an image classifier on held-out images, exactly over all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ddptrain.config.wording import counted, listed
from ddptrain.errors import UsageError
from ddptrain.workloads.images.data.held_out import evaluated_only, evaluated_params
from ddptrain.workloads.images.data.manifest import Manifest
from ddptrain.workloads.images.loader.batches import BadImages, val_loader
from ddptrain.workloads.images.model.build_model import PixelNormalizer
from ddptrain.workloads.images.model.saved_classifier import SavedConfig, load_classifier
from ddptrain.workloads.images.params import ImagesParams
from ddptrain.workloads.images.train import evaluate as evaluate_model

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext
    from ddptrain.rank.evaluation import SavedCheckpoint

_MOST_NAMED = 5


def evaluate(ctx: RankContext, checkpoint: SavedCheckpoint) -> dict[str, float]:
    """Return val/loss, val/accuracy and val/top5 on the images whose classes all compared models know.

    Raises UsageError if the checkpoint is not one of this workload, or knows none of the classes.
    """
    if ctx.inputs is None:
        raise UsageError("there are no images to evaluate on: start an evaluation with `ddptrain evaluate`")
    model, config = load_classifier(checkpoint.path)
    everything = Manifest.read(ctx.inputs)
    classes = comparable_classes(everything.classes, _known_classes(checkpoint.compared))
    if missing := [name for name in classes if name not in config.classes]:
        raise UsageError(f"it knows none of the classes of the images to evaluate on: {listed(missing, _MOST_NAMED)}")
    manifest = evaluated_only(everything, classes)
    _note_classes(checkpoint, everything, manifest, classes)
    settings = evaluated_params(ImagesParams.model_validate(dict(checkpoint.params)), checkpoint.data)
    settings = settings.model_copy(update={"image_size": config.image_size})
    described = config.model_dump()
    outputs = torch.tensor(class_outputs(everything.classes, config), device=ctx.device)
    pixels = PixelNormalizer(described, ctx.device)
    numbers, bad = itertools.count(1), BadImages(manifest, settings.max_bad_fraction)
    batches = val_loader(ctx, manifest, settings)
    metrics = evaluate_model(
        model.to(ctx.device),
        pixels,
        batches,
        outputs,
        bad,
        report=lambda: ctx.progress(next(numbers), unit="batches"),
    )
    if n_bad := bad.check(ctx.device):
        checkpoint.notes.append(f"{n_bad:,} of {len(manifest.val):,} images could not be read")
    return metrics


def comparable_classes(images: Sequence[str], models: Sequence[Sequence[str]]) -> list[str]:
    """Return the classes of the images that all models know; models that know none of them do not count.

    All classes of the images if no model knows any.
    """
    able = [set(known) for known in models if set(known) & set(images)]
    return [name for name in images if all(name in known for known in able)] if able else list(images)


def class_outputs(classes: Sequence[str], config: SavedConfig) -> list[int]:
    """Return the model's output for each class; 0 for one that the model does not know: its images are left out."""
    output_of = dict(zip(config.classes, config.outputs, strict=True))
    return [output_of.get(name, 0) for name in classes]


def _known_classes(compared: Mapping[str, Path]) -> list[list[str]]:
    """Return the classes of each model that can be read; the others cannot be scored."""
    known = []
    for folder in compared.values():
        try:
            state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
            known.append(list(SavedConfig.restored(state["extra"]["model_config"]).classes))
        except Exception:  # damaged files raise arbitrary errors; the evaluation of that checkpoint reports them
            continue
    return known


def _note_classes(
    checkpoint: SavedCheckpoint, everything: Manifest, compared: Manifest, classes: Sequence[str]
) -> None:
    all_images = evaluated_only(everything).val
    left_out = [name for name in everything.classes if name not in classes]
    n_left_out = len(all_images) - len(compared.val)
    if n_left_out:
        checkpoint.notes.append(
            f"{counted(n_left_out, 'image')} of {len(all_images):,} are left out, because not all models know their "
            f"classes: {listed(left_out, _MOST_NAMED)}"
        )
    if not len(compared.val):
        raise UsageError("no image to evaluate on has a class that all models know")
