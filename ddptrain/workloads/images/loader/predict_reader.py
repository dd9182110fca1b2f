"""Reads and decodes the inputs of `predict`: many at a time, in their order, in bounded memory."""

from __future__ import annotations

import os
import queue
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from ddptrain.workloads.images.data.predict_inputs import InputProblem, PredictInput
from ddptrain.workloads.images.loader.decode import CorruptImage, decode_eval, ignore_pillow_warnings

Image = NDArray[np.uint8]  # [3, size, size]
Look = Callable[[], Image | str]

THREADS = 32  # more than cores: on a network file system they mostly wait
_MOST_BYTES = 1 << 30


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
