"""Orders become pixels: threads that read, a few that decode, and a piece of memory that takes what comes out.

It runs in the processes that decode, and in the rank itself where there are none; needs neither torch nor numpy.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ddptrain.workloads.images.loader.decode import Augment, CorruptImage, decode_pixels
from ddptrain.workloads.images.loader.reader import Reader, Readers, ReadFault, Wanted


@dataclass(frozen=True, slots=True)
class Order:
    """An image to be read and decoded into a slot; `seed` is that of its augmentation, None sees its centre."""

    ticket: int
    slot: int
    wanted: Wanted
    seed: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """That an order is done, or why its image can't be had; or why none can, where the store `is_away`."""

    ticket: int
    reason: str = ""
    is_away: bool = False


class Pipeline:
    """Takes orders, in any number, and answers each; `answer` is called by its threads, and not for long.

    pixels: a writable buffer of slots, each [size, size, 3] bytes.
    """

    def __init__(
        self,
        reader: Reader | Readers,
        pixels: memoryview,
        size: int,
        augment: Augment,
        answer: Callable[[Answer], None],
        *,
        readers: int,
        decoders: int,
    ) -> None:
        self._reader, self._pixels, self._size, self._augment = reader, pixels, size, augment
        self._answer = answer
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._read: queue.SimpleQueue[tuple[Order, bytes | ReadFault] | None] = queue.SimpleQueue()
        self._closed = False
        self._readers = self._start(self._fetch, readers)
        self._decoders = self._start(self._decode, decoders)

    def put(self, order: Order) -> None:
        """Take an order."""
        self._orders.put(order)

    def close(self) -> None:
        """End: orders under way may still be answered, others are not."""
        self._closed = True
        for _ in self._readers:
            self._orders.put(None)
        for _ in self._decoders:
            self._read.put(None)

    def _start(self, target: Callable[[], None], count: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=target, name="ddptrain-images", daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        return threads

    def _fetch(self) -> None:
        while (order := self._orders.get()) is not None and not self._closed:
            try:
                data = self._reader.read(order.wanted)
            except Exception as error:  # a bug, or a store that can't be opened: said, rather than waited for
                data = ReadFault(order.wanted.key, f"{type(error).__name__}: {error}")
            self._read.put((order, data))

    def _decode(self) -> None:
        draw = random.Random()
        while (read := self._read.get()) is not None and not self._closed:
            order, data = read
            if isinstance(data, ReadFault):
                self._answer(Answer(order.ticket, data.away or data.reason, bool(data.away)))
            else:
                self._answer(Answer(order.ticket, self._fill(order, data, draw)))

    def _fill(self, order: Order, data: bytes, draw: random.Random) -> str:
        """Decode an image into its slot; says why where that can't be done."""
        n_bytes = self._size * self._size * 3
        draw.seed(order.seed)
        try:
            pixels = decode_pixels(data, self._size, None if order.seed is None else self._augment, draw)
        except CorruptImage as error:
            return f"corrupt: {error}"
        except MemoryError:
            return "not enough memory to decode it"
        self._pixels[order.slot * n_bytes : (order.slot + 1) * n_bytes] = pixels
        return ""
