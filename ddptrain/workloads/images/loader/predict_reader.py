"""Images from anywhere, read and decoded: many at a time, given on in their order, in bounded memory."""

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

from ddptrain.workloads.images.data.predict_inputs import Given, Trouble, in_words
from ddptrain.workloads.images.loader.decode import CorruptImage, decode_eval
from ddptrain.workloads.images.loader.reader import Reader, ReadFault, Tries, Wanted

Image = NDArray[np.uint8]  # [3, size, size]
Look = Callable[[], Image | str]

THREADS = 32  # more than there are cores: with a store they wait most of the time
_MOST_BYTES = 1 << 30
_TRIES = Tries(deadline_s=20.0)  # somebody is waiting for the command


def decoded(given: Iterable[Given | Trouble], size: int, ahead: int) -> Iterator[tuple[Given | Trouble, Image | str]]:
    """Each image as a model of that size sees it, or what is wrong with it; about `ahead` of them are under way."""
    waiting: deque[tuple[Given | Trouble, Future[Image | str]]] = deque()
    readers: dict[str, Reader] = {}
    with _threads(THREADS) as submit:
        for one in given:
            waiting.append((one, submit(_look(one, size, readers))))
            if len(waiting) > ahead:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()


def _look(one: Given | Trouble, size: int, readers: dict[str, Reader]) -> Look:
    """What is to be done to have it, by any thread."""
    if isinstance(one, Trouble):
        return lambda: one.reason
    if one.location is None:
        return lambda: _image(_read_file(one.key), size)
    if one.location.url not in readers:
        readers[one.location.url] = Reader(one.location, tries=_TRIES)
    reader = readers[one.location.url]
    return lambda: _image(_read(reader, one), size)


def _image(data: bytes | str, size: int) -> Image | str:
    if isinstance(data, str):
        return data
    try:
        return decode_eval(data, size)
    except CorruptImage as error:
        return str(error)


def _read(reader: Reader, one: Given) -> bytes | str:
    data = reader.read(Wanted(one.key))
    return in_words(data.reason, one.name) if isinstance(data, ReadFault) else data


def _read_file(path: str) -> bytes | str:
    try:
        state = os.stat(path)
        if not stat.S_ISREG(state.st_mode):  # opening a FIFO would wait for a writer
            return "is not a regular file"
        if state.st_size > _MOST_BYTES:
            return f"has {state.st_size:,} bytes, which no image has"
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        return error.strerror or str(error)


@contextmanager
def _threads(count: int) -> Iterator[Callable[[Look], Future[Image | str]]]:
    """Does what it is given in that many threads, which keep nobody from leaving: a store may not answer for long."""
    work: queue.SimpleQueue[tuple[Look, Future[Image | str]] | None] = queue.SimpleQueue()
    over = threading.Event()

    def run() -> None:
        while (order := work.get()) is not None and not over.is_set():
            look, future = order
            try:
                future.set_result(look())
            except BaseException as error:  # raised by whoever waits for it
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
