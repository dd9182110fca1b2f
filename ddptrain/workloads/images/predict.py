"""Classifies images with a trained model, in batches, while the next images are read."""

from __future__ import annotations

import itertools
import math
import os
import queue
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddptrain.errors import UsageError
from ddptrain.workloads.images.data.predict_inputs import InputProblem, PredictInput
from ddptrain.workloads.images.loader.decode import CorruptImage, decode_eval, ignore_pillow_warnings
from ddptrain.workloads.images.model.build_model import PixelNormalizer
from ddptrain.workloads.images.model.saved_classifier import SavedModel

Image = NDArray[np.uint8]  # [3, size, size]
Look = Callable[[], Image | str]

THREADS = 32  # more than cores: on a network file system they mostly wait
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


class Classifier:
    """A saved model on a device; it returns the `top` most probable of all outputs."""

    def __init__(self, saved: SavedModel, top: int, device: torch.device) -> None:
        self._names = saved.names
        self._top = min(top, len(saved.names))
        self._size = saved.config.image_size
        self._device = device
        self._model = saved.model.to(device)
        self._pixels = PixelNormalizer(saved.config.model_dump(), device)

    def results(self, inputs: Iterable[PredictInput | InputProblem], batch_size: int) -> Iterator[ImageResult]:
        """Yield the result of each input, in their order, as soon as its batch is done.

        Memory is bounded by one batch and the images that are read ahead, for any number of inputs.

        Raises UsageError if a batch does not fit into the memory of the device.
        """
        images = decoded(inputs, self._size, ahead=batch_size + THREADS)
        while batch := list(itertools.islice(images, batch_size)):
            predicted = iter(self._predictions([image for _, image in batch if not isinstance(image, str)]))
            for item, image in batch:
                yield (
                    ImageResult(item.name, error=image)
                    if isinstance(image, str)
                    else _result(item.name, next(predicted))
                )

    def _predictions(self, images: Sequence[Image]) -> list[tuple[Prediction, ...]]:
        if not images:
            return []
        try:
            with torch.inference_mode():
                scores: Tensor = self._model(self._pixels(torch.from_numpy(np.stack(images))))
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


def decoded(
    inputs: Iterable[PredictInput | InputProblem], size: int, ahead: int
) -> Iterator[tuple[PredictInput | InputProblem, Image | str]]:
    """Yield each input with its image [3, size, size], or with the reason why it is unreadable.

    ahead: how many inputs are read before they are needed.
    """
    ignore_pillow_warnings()
    waiting: deque[tuple[PredictInput | InputProblem, Future[Image | str]]] = deque()
    with _threads(THREADS) as submit:
        for item in inputs:
            waiting.append((item, submit(_look(item, size))))
            if len(waiting) > ahead:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()


def _look(item: PredictInput | InputProblem, size: int) -> Look:
    """Return a function for any thread that reads and decodes an input."""
    if isinstance(item, InputProblem):
        return lambda: item.reason
    return lambda: _image(_read_file(item.name), size)


def _image(data: bytes | str, size: int) -> Image | str:
    if isinstance(data, str):
        return data
    try:
        return decode_eval(data, size)
    except CorruptImage as error:
        return str(error)


def _read_file(path: str) -> bytes | str:
    try:
        state = os.stat(path)
        if not stat.S_ISREG(state.st_mode):  # opening a FIFO would wait for a writer
            return "is not a regular file"
        if state.st_size > _MOST_BYTES:
            return f"has {state.st_size:,} bytes, which is too large for an image"
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        return error.strerror or str(error)


@contextmanager
def _threads(count: int) -> Iterator[Callable[[Look], Future[Image | str]]]:
    """Call functions in `count` threads. They are daemons, so the process can end while a disk does not answer."""
    work: queue.SimpleQueue[tuple[Look, Future[Image | str]] | None] = queue.SimpleQueue()
    over = threading.Event()

    def run() -> None:
        while (order := work.get()) is not None and not over.is_set():
            look, future = order
            try:
                future.set_result(look())
            except BaseException as error:  # raised again by the caller of result()
                future.set_exception(error)

    def submit(look: Look) -> Future[Image | str]:
        future: Future[Image | str] = Future()
        work.put((look, future))
        return future

    for _ in range(count):
        threading.Thread(target=run, name="ddptrain-predict", daemon=True).start()
    try:
        yield submit
    finally:
        over.set()
        for _ in range(count):
            work.put(None)
