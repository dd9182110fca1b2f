"""Classifies images with a trained model, in batches, while workers of a DataLoader read the next ones."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddptrain.errors import UsageError
from ddptrain.workloads.images.data import loader_workers
from ddptrain.workloads.images.decode import CorruptImage, decode_eval, ignore_pillow_warnings
from ddptrain.workloads.images.listing import GivenImage
from ddptrain.workloads.images.model import ModelInput, SavedModel

_MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Prediction:
    """A class and the probability that the model gives it."""

    name: str
    probability: float


@dataclass(frozen=True, slots=True)
class ImageResult:
    """The classes of an image, the most probable first, or the reason why there are none."""

    file: str
    predictions: tuple[Prediction, ...] = ()
    error: str = ""


def choose_device(name: str) -> torch.device:
    """Return the device of a name; `auto` is a GPU if there is one. Raises UsageError."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU on this machine; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def default_batch_size(device: torch.device) -> int:
    """Return the number of images that keeps a device busy."""
    return 128 if device.type == "cuda" else 16


Pixels = NDArray[np.uint8]  # [3, size, size]


class Classifier:
    """A saved model on a device; it returns the `top` most probable of all outputs."""

    def __init__(self, saved: SavedModel, top: int, device: torch.device) -> None:
        self._names = saved.names
        self._top = min(top, len(saved.names))
        self._size = saved.config.image_size
        self._device = device
        self._model = saved.model.to(device)
        self._pixels = ModelInput(saved.config.model_dump(), device)

    def results(self, given: Sequence[GivenImage], batch_size: int) -> Iterator[ImageResult]:
        """Yield the result of each image, in their order, as soon as its batch is done.

        Raises UsageError if a batch does not fit into the memory of the device.
        """
        workers = loader_workers("auto", self._device) if len(given) > batch_size else 0
        how = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
        files = iter(given)
        for batch in DataLoader(_Files(given, self._size), batch_size, collate_fn=list, **how):  # type: ignore[arg-type]
            predicted = iter(self._predictions([image for image in batch if not isinstance(image, str)]))
            for image in batch:
                name = next(files).name
                yield ImageResult(name, error=image) if isinstance(image, str) else _result(name, next(predicted))

    def _predictions(self, images: Sequence[Pixels]) -> list[tuple[Prediction, ...]]:
        if not images:
            return []
        try:
            with torch.inference_mode():
                scores: Tensor = self._model(self._pixels(torch.stack([torch.from_numpy(image) for image in images])))
                probabilities, outputs = scores.float().softmax(dim=1).topk(self._top, dim=1)
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"not enough memory on {self._device} for {len(images)} images at a time: give a smaller --batch-size"
            ) from error
        return [
            tuple(Prediction(self._names[output], probability) for probability, output in zip(*row, strict=True))
            for row in zip(probabilities.tolist(), outputs.tolist(), strict=True)
        ]


def _result(file: str, predictions: tuple[Prediction, ...]) -> ImageResult:
    if any(math.isnan(prediction.probability) for prediction in predictions):
        return ImageResult(file, error="the model returns NaN for it; did its training diverge?")
    return ImageResult(file, predictions)


class _Files(Dataset["Pixels | str"]):
    """Files as uint8 [3, size, size], or the reason why they are unreadable."""

    def __init__(self, given: Sequence[GivenImage], size: int) -> None:
        self._given, self._size = given, size

    def __len__(self) -> int:
        return len(self._given)

    def __getitem__(self, index: int) -> Pixels | str:
        ignore_pillow_warnings()
        name, problem = self._given[index].name, self._given[index].problem
        try:
            state = os.stat(name) if not problem else None
            if state is None:
                return problem
            if not stat.S_ISREG(state.st_mode):  # opening a FIFO would wait for a writer
                return "is not a regular file"
            if state.st_size > _MOST_BYTES:
                return f"has {state.st_size:,} bytes, which is too large for an image"
            with open(name, "rb") as file:
                return decode_eval(file.read(), self._size)  # an array: a tensor from a worker keeps a file open
        except OSError as error:
            return error.strerror or str(error)
        except CorruptImage as error:
            return str(error)
