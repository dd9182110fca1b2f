"""Validation of an image classifier, exact over all ranks: metrics, tables, and the evaluation of a checkpoint."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softmax

from ddptrain.config.wording import counted, listed
from ddptrain.errors import UsageError
from ddptrain.workloads.images.batches import BadImages, Batch, val_loader
from ddptrain.workloads.images.classifier import PixelNormalizer, SavedConfig, answer_names, load_classifier
from ddptrain.workloads.images.listing import evaluated_only, evaluated_params
from ddptrain.workloads.images.manifest import Manifest
from ddptrain.workloads.images.params import ImagesParams

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext
    from ddptrain.rank.evaluation import SavedCheckpoint

_MOST_NAMED = 5
COLUMNS = ("key", "label", "prediction", "probability")
TRAINED = "train_predictions"
TRAINED_COLUMNS = ("image", "label", "prediction", "score")
_EXAMPLES = 8  # images in a picture
_STEPS_BETWEEN = 4  # one batch of this many is in the table of training images


@torch.inference_mode()
def evaluate_model(
    model: nn.Module,
    pixels: nn.Module,
    batches: Iterable[Batch],
    outputs: Tensor,
    bad: BadImages,
    table: PredictionTable | None = None,
    report: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return val/loss in nats, val/accuracy and val/top5: the means over the images of all ranks, NaN without images.

    All ranks must call it; each may have any number of batches. Unreadable images do not count, and go into `bad`.

    pixels: converts the bytes of a batch to the model's input.
    outputs: int64 [classes], on the device: the model's output for each class.
    report: is called after each batch, to report activity.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=outputs.device)
    for batch in batches:
        report()
        bad.add(batch.bad)
        if len(batch.labels) == 0:
            continue
        labels = batch.labels.to(outputs.device, non_blocking=True)
        logits, targets = model(pixels(batch.images)).float(), outputs[labels]
        loss = cross_entropy(logits, targets, reduction="sum")
        is_right = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
        sums += torch.stack([loss, is_right[:, 0].sum(), is_right.sum(), targets.new_tensor(len(targets))]).double()
        if table is not None:
            probability, output = softmax(logits, 1).max(1)
            table.add(batch.index, labels, output, probability)
    model.train(was_training)
    dist.all_reduce(sums)
    *totals, count = sums.tolist()
    names = ("val/loss", "val/accuracy", "val/top5")
    return {name: total / count if count else math.nan for name, total in zip(names, totals, strict=True)}


# --- tables and pictures ---


class PredictionTable:
    """Collects the predictions of a rank on the device; csv() reads them once, at the end."""

    def __init__(self, keys: Sequence[str], model_config: Mapping[str, Any]) -> None:
        self._keys = keys
        self._classes: Sequence[str] = model_config["classes"]
        self._names = answer_names(model_config)
        self._kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, index: Tensor, labels: Tensor, outputs: Tensor, probabilities: Tensor) -> None:
        """Add the n images of a batch: int64 [n] indices of keys, classes and outputs; float [n] probabilities."""
        self._kept.append((index, labels, outputs, probabilities))

    def csv(self) -> bytes:
        """Return the table as a CSV file: key, class, predicted class and its probability of each image."""
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for batch in self._kept:
            for index, label, output, probability in zip(*(column.tolist() for column in batch), strict=True):
                names = self._keys[index], self._classes[label], self._names[output]
                writer.writerow((*names, f"{probability:.6g}"))
        return text.getvalue().encode()


class TrainingTable:
    """Collects images of the last epoch with their predictions; at most `most` of this rank."""

    def __init__(self, model_config: Mapping[str, Any], most: int) -> None:
        self._classes: Sequence[str] = model_config["classes"]
        self._names = answer_names(model_config)
        self._left = most
        self._steps = 0
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, images: Tensor, labels: Tensor, logits: Tensor) -> None:
        """Add the batch of a step: uint8 [n, 3, s, s], classes [n], and logits [n, outputs] on their device."""
        is_due = self._steps % _STEPS_BETWEEN == 0  # the first batch is: an epoch may be short
        self._steps += 1
        if self._left and is_due:
            n = min(self._left, len(labels))
            self._left -= n
            self._kept.append((images[:n].clone(), labels[:n].clone(), logits[:n].detach().float().softmax(1)))

    def rows(self) -> list[tuple[Tensor, str, str, float]]:
        """(pixels, class, predicted class, probability) of each collected image."""
        found = []
        for images, labels, shares in self._kept:
            scores, outputs = (column.tolist() for column in shares.max(1))
            for image, label, output, score in zip(images, labels.tolist(), outputs, scores, strict=True):
                found.append((image, self._classes[label], self._names[output], score))
        return found


def example_strip(images: Tensor) -> Tensor:
    """Return the first images of a batch, uint8 [n, 3, s, s], side by side: [3, s, w]."""
    return torch.cat(list(images[:_EXAMPLES]), dim=2)


def example_words(logits: Tensor, labels: Tensor, model_config: Mapping[str, Any]) -> str:
    """Return the caption of the strip: class and predicted class of each image, as "cat: dog 51 %"."""
    classes, names = model_config["classes"], answer_names(model_config)
    shares, outputs = logits[:_EXAMPLES].detach().float().softmax(1).max(1)
    examples = zip(labels[:_EXAMPLES].tolist(), outputs.tolist(), shares.tolist(), strict=True)
    return ", ".join(f"{classes[label]}: {names[output]} {share:.0%}" for label, output, share in examples)


# --- the evaluation of a checkpoint ---


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
    numbers, bad = itertools.count(1), BadImages(manifest, settings.max_bad_fraction)
    metrics = evaluate_model(
        model.to(ctx.device),
        PixelNormalizer(config.model_dump(), ctx.device),
        val_loader(ctx, manifest, settings),
        torch.tensor(class_outputs(everything.classes, config), device=ctx.device),
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
