"""Tables of predictions on held-out and on training images, and pictures of training images."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

COLUMNS = ("key", "label", "prediction", "probability")
TRAINED = "train_predictions"
TRAINED_COLUMNS = ("image", "label", "prediction", "score")
_EXAMPLES = 8  # images in a picture
_STEPS_BETWEEN = 4  # one batch of this many is in the table of training images

Row = tuple[str, str, str, float]


class PredictionTable:
    """Collects the predictions of a rank on the device; `rows` reads them once, at the end."""

    def __init__(self, keys: Sequence[str], model_config: Mapping[str, Any]) -> None:
        self._keys = keys
        self._classes: Sequence[str] = model_config["classes"]
        self._names = answer_names(model_config)
        self._kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, index: Tensor, labels: Tensor, outputs: Tensor, probabilities: Tensor) -> None:
        """Add the n images of a batch: int64 [n] indices of keys, classes and outputs; float [n] probabilities."""
        self._kept.append((index, labels, outputs, probabilities))

    def rows(self) -> list[Row]:
        """(key, class, predicted class, probability) of each image."""
        return [
            (self._keys[index], self._classes[label], self._names[output], probability)
            for batch in self._kept
            for index, label, output, probability in zip(*(column.tolist() for column in batch), strict=True)
        ]


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


def answer_names(model_config: Mapping[str, Any]) -> list[str]:
    """The name of each output of a model: that of the data's class, if it has one, else the label of the weights."""
    names = list(model_config["output_names"])
    for name, output in zip(model_config["classes"], model_config["outputs"], strict=True):
        names[output] = name
    return names


def table_file(rows: Sequence[Row]) -> bytes:
    """Return the table as the content of a CSV file."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((*words, f"{probability:.6g}") for *words, probability in rows)
    return text.getvalue().encode()


def example_strip(images: Tensor) -> Tensor:
    """Return the first images of a batch, uint8 [n, 3, s, s], side by side: [3, s, w]."""
    return torch.cat(list(images[:_EXAMPLES]), dim=2)


def example_words(logits: Tensor, labels: Tensor, model_config: Mapping[str, Any]) -> str:
    """Return the caption of the strip: class and predicted class of each image, as "cat: dog 51 %"."""
    classes, names = model_config["classes"], answer_names(model_config)
    shares, outputs = logits[:_EXAMPLES].detach().float().softmax(1).max(1)
    examples = zip(labels[:_EXAMPLES].tolist(), outputs.tolist(), shares.tolist(), strict=True)
    return ", ".join(f"{classes[label]}: {names[output]} {share:.0%}" for label, output, share in examples)
