"""What a process runs that decodes images for a rank: orders come on stdin, answers go to a pipe, both as JSON lines.

It ends when stdin does, which is when its rank ends, however it ends; signals that a whole group gets are the rank's
business. It imports neither torch nor numpy.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import queue
import signal
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ddptrain.storage.base import Location
from ddptrain.workloads.images.loader.cache import Cache
from ddptrain.workloads.images.loader.decode import Augment
from ddptrain.workloads.images.loader.pipeline import Answer, Order, Pipeline
from ddptrain.workloads.images.loader.reader import Reader, Readers, Tries, Wanted

_MOST_TOLD = 64  # answers in a line
_LOOK_S = 2.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a decode process is told first; travels as JSON."""

    url: str
    options: dict[str, Any]
    cache_dir: str | None
    cache_bytes: int
    deadline_s: float
    size: int
    augment: Augment
    readers: int
    pixels_fd: int
    answers_fd: int
    val_url: str = ""

    def reader(self) -> Reader | Readers:
        """Reads as it is told here."""
        cache = Cache(Path(self.cache_dir), self.cache_bytes, _say) if self.cache_dir else None
        source, val_source = (
            Reader(Location(url, self.options), cache, Tries(self.deadline_s)) for url in (self.url, self.val_url)
        )
        return Readers(source, val_source) if self.val_url else source


def _say(text: str) -> None:
    print(text, flush=True)  # into the log of the rank


def main(orders: BinaryIO) -> None:
    """Take the setup, then orders until there are no more; this process ends with it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})  # its rank has blocked them till here
    warnings.simplefilter("ignore")  # pillow's, about images that it reads all the same
    setup = Setup(**json.loads(orders.readline()))
    pixels = memoryview(mmap.mmap(setup.pixels_fd, 0))
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    _write(setup.answers_fd, [])  # from here on it may be an image that ends this process
    threading.Thread(target=_tell, args=(answers, setup.answers_fd), daemon=True).start()
    reader = setup.reader()
    # Two, as one of them often waits for the interpreter, which those that read use, too.
    pipeline = Pipeline(reader, pixels, setup.size, setup.augment, answers.put, readers=setup.readers, decoders=2)
    for line in orders:
        for ticket, slot, wanted, seed in json.loads(line):
            pipeline.put(Order(ticket, slot, Wanted(*wanted), seed))
    os._exit(0)  # whatever is being read or decoded


def _tell(answers: queue.SimpleQueue[Answer], fd: int) -> None:
    """Writes answers as they come, those that wait in one line; ends the process when its rank is gone."""
    rank_pid = os.getppid()
    while True:
        try:
            told = [answers.get(timeout=_LOOK_S)]
        except queue.Empty:
            if os.getppid() != rank_pid:  # and a child that it had forked keeps stdin open
                os._exit(0)
            continue
        while len(told) < _MOST_TOLD and not answers.empty():
            told.append(answers.get())
        _write(fd, [dataclasses.astuple(answer) if answer.reason else answer.ticket for answer in told])


def _write(fd: int, what: Sequence[object]) -> None:
    try:
        os.write(fd, json.dumps(what).encode() + b"\n")
    except OSError:
        os._exit(0)  # the rank is gone
