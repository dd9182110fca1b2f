"""Reads and decodes images into slots of shared memory, with threads for reading and threads for decoding.

Runs in decode processes, or in the rank if it has none; needs neither torch nor numpy.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ddptrain.workloads.images.loader.decode import Augment, CorruptImage, decode_pixels, ignore_pillow_warnings
from ddptrain.workloads.images.loader.image_reader import ImageRef, ReadFailure


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """A request to read and decode an image into a slot; `seed` is for its augmentation, None crops the centre."""

    ticket: int
    slot: int
    wanted: ImageRef
    seed: int | None


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """The result of a request; `reason` is empty on success. `is_away`: the store as a whole does not answer."""

    ticket: int
    reason: str = ""
    is_away: bool = False


class Pipeline:
    """Takes any number of requests, and calls `on_result` with the result of each, in its threads.

    `on_result` must not block.

    pixels: a writable buffer of slots, each [size, size, 3] bytes.
    """

    def __init__(
        self,
        read: Callable[[ImageRef], bytes | ReadFailure],
        pixels: memoryview,
        size: int,
        augment: Augment,
        on_result: Callable[[DecodeResult], None],
        *,
        readers: int,
        decoders: int,
    ) -> None:
        ignore_pillow_warnings()
        self._read_image, self._pixels, self._size, self._augment = read, pixels, size, augment
        self._on_result = on_result
        self._requests: queue.SimpleQueue[DecodeRequest | None] = queue.SimpleQueue()
        self._read: queue.SimpleQueue[tuple[DecodeRequest, bytes | ReadFailure] | None] = queue.SimpleQueue()
        self._closed = False
        self._readers = self._start(self._fetch, readers)
        self._decoders = self._start(self._decode, decoders)

    def put(self, request: DecodeRequest) -> None:
        """Add a request."""
        self._requests.put(request)

    def close(self) -> None:
        """End the threads: requests in progress may still get results, others do not."""
        self._closed = True
        for _ in self._readers:
            self._requests.put(None)
        for _ in self._decoders:
            self._read.put(None)

    def _start(self, target: Callable[[], None], count: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=target, name="ddptrain-images", daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        return threads

    def _fetch(self) -> None:
        while (request := self._requests.get()) is not None and not self._closed:
            try:
                data = self._read_image(request.wanted)
            except Exception as error:  # a bug, or a store that can't be opened: report it instead of hanging
                data = ReadFailure(request.wanted.key, f"{type(error).__name__}: {error}")
            self._read.put((request, data))

    def _decode(self) -> None:
        draw = random.Random()
        while (read := self._read.get()) is not None and not self._closed:
            request, data = read
            if isinstance(data, ReadFailure):
                self._on_result(DecodeResult(request.ticket, data.away or data.reason, bool(data.away)))
            else:
                self._on_result(DecodeResult(request.ticket, self._fill(request, data, draw)))

    def _fill(self, request: DecodeRequest, data: bytes, draw: random.Random) -> str:
        """Decode an image into its slot; return the reason if that fails."""
        n_bytes = self._size * self._size * 3
        draw.seed(request.seed)
        try:
            pixels = decode_pixels(data, self._size, None if request.seed is None else self._augment, draw)
        except CorruptImage as error:
            return f"corrupt: {error}"
        except MemoryError:
            return "not enough memory to decode it"
        self._pixels[request.slot * n_bytes : (request.slot + 1) * n_bytes] = pixels
        return ""
