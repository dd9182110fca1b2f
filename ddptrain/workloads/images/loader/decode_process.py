"""The program of a decode process: requests come on stdin, results go to a pipe, both as lines of JSON.

The process ends when its stdin does, so it ends with its rank in every case. It ignores signals that a whole process
group gets. It imports neither torch nor numpy.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ddptrain.storage.store import Location
from ddptrain.workloads.images.loader.cache import Cache
from ddptrain.workloads.images.loader.decode import Augment
from ddptrain.workloads.images.loader.image_reader import ImageRef, Reader, ReadFailure, RetryPolicy
from ddptrain.workloads.images.loader.pipeline import DecodeRequest, DecodeResult, Pipeline

_MOST_RESULTS = 64  # results in a line
_CHECK_PARENT_S = 2.0


@dataclass(frozen=True, slots=True)
class DecodeSetup:
    """The first message to a decode process, as JSON.

    size: width and height of the decoded images. readers: threads that read. pixels_fd: the shared memory of all slots.
    results_fd: the pipe for results. val_url: the location of the validation images; "" if they are in the source.
    """

    url: str
    options: dict[str, Any]
    cache_dir: str | None
    cache_bytes: int
    deadline_s: float
    size: int
    augment: Augment
    readers: int
    pixels_fd: int
    results_fd: int
    val_url: str = ""

    def reader(self) -> Callable[[ImageRef], bytes | ReadFailure]:
        """Return a function that reads an image of either location, with the cache."""
        cache = Cache(Path(self.cache_dir), self.cache_bytes, _print) if self.cache_dir else None
        source, val_source = (
            Reader(Location(url, self.options), cache, RetryPolicy(self.deadline_s)) for url in (self.url, self.val_url)
        )
        return lambda image: (val_source if image.in_val_source else source).read(image)


def _print(text: str) -> None:
    print(text, flush=True)  # goes to the log of the rank


def main(requests: BinaryIO) -> None:
    """Read the setup, then requests until stdin ends; then this process ends."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})  # blocked by the rank until here
    setup = DecodeSetup(**json.loads(requests.readline()))
    pixels = memoryview(mmap.mmap(setup.pixels_fd, 0))
    results: queue.SimpleQueue[DecodeResult] = queue.SimpleQueue()
    _write(setup.results_fd, [])  # the rank then knows that an image may have ended this process
    threading.Thread(target=_send_results, args=(results, setup.results_fd), daemon=True).start()
    # Two decoders, because one often waits for the interpreter lock, which the readers use, too.
    pipeline = Pipeline(
        setup.reader(), pixels, setup.size, setup.augment, results.put, readers=setup.readers, decoders=2
    )
    for line in requests:
        for ticket, slot, ref, seed in json.loads(line):
            pipeline.put(DecodeRequest(ticket, slot, ImageRef(*ref), seed))
    os._exit(0)  # without waiting for reads or decodes in progress


def _send_results(results: queue.SimpleQueue[DecodeResult], fd: int) -> None:
    """Write results as they come, several in a line; end the process when its rank has ended."""
    rank_pid = os.getppid()
    while True:
        try:
            batch = [results.get(timeout=_CHECK_PARENT_S)]
        except queue.Empty:
            if os.getppid() != rank_pid:  # a forked child of the rank may keep stdin open
                os._exit(0)
            continue
        while len(batch) < _MOST_RESULTS and not results.empty():
            batch.append(results.get())
        _write(fd, [dataclasses.astuple(result) if result.reason else result.ticket for result in batch])


def _write(fd: int, what: Sequence[object]) -> None:
    try:
        os.write(fd, json.dumps(what).encode() + b"\n")
    except OSError:
        os._exit(0)  # the rank has ended
