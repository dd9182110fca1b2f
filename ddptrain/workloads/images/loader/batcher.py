"""Assembles batches: one thread requests images ahead of the training and copies complete batches."""

from __future__ import annotations

import itertools
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddptrain.config.wording import shorten
from ddptrain.storage.store import StoreUnreachable
from ddptrain.workloads.data_shards import RankShare
from ddptrain.workloads.images.data.manifest import Manifest
from ddptrain.workloads.images.loader.bad_images import BadImages
from ddptrain.workloads.images.loader.decode_pool import DecodePool, ProcessDied
from ddptrain.workloads.images.loader.image_reader import ImageRef
from ddptrain.workloads.images.loader.pipeline import DecodeRequest, DecodeResult

READY = 2  # complete batches that wait for the training
_MOST_READING_BYTES = 256 << 20  # of encoded images that are requested and not yet decoded
_USUAL_BYTES = 1 << 20  # assumed for an image whose size the store did not report
_LONGEST = 700  # characters of a store's message


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of one step.

    A rank that has no image in a step gets one row of zeros and `n_counted` 0, because DDP waits for all ranks.

    images: uint8 [n, 3, size, size], in channels_last memory; pinned if the rank has a GPU.
    labels: int64 [n], indices into manifest.classes.
    index: int64 [n], indices into manifest.keys: of the image that is shown, also if it replaces another.
    ok: bool [n], false if the planned image is unreadable: training shows a replacement, validation zeros.
    total: images of all ranks in this step, as planned.
    n_counted: the number of rows; 0 for the row of zeros.
    """

    images: Tensor
    labels: Tensor
    index: Tensor
    ok: Tensor
    total: int
    n_counted: int


@dataclass(eq=False, slots=True)
class BatchStream:
    """The batches of an epoch, or of a validation.

    index: int64, indices into manifest.keys; the shares index into it.
    seed: of the epoch's augmentation; None selects the centre of each image.
    """

    name: tuple[object, ...]
    shares: Sequence[RankShare]
    index: Tensor
    seed: int | None
    ready: queue.SimpleQueue[Batch | Exception] = field(default_factory=queue.SimpleQueue)
    n_ready: int = 0  # used by the thread of the batcher only

    def take(self) -> None:
        """The training has taken a batch."""
        self.n_ready -= 1

    def seed_of(self, index: int) -> int | None:
        """Return the seed for the augmentation of a planned image: equal in each process and for each replacement."""
        return None if self.seed is None else (self.seed << 32) | index


_BatchRow = tuple["_PendingBatch", int]
# A call of a method, or what the decode pool reports; None ends the thread.
Message = Callable[[], None] | Sequence[DecodeResult] | ProcessDied


@dataclass(eq=False, slots=True)
class _PendingBatch:
    """A batch in progress. A row without a slot shows a bad image in validation: it stays zero."""

    stream: BatchStream
    total: int
    planned: Sequence[int]
    shown: list[int]
    slots: list[int | None]
    unanswered: set[int]  # rows
    bad: set[int] = field(default_factory=set)  # rows
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class _RowRequest:
    """A requested image: the row that it is for, and the replacements that remain if it is unreadable."""

    pending: _PendingBatch
    row: int
    slot: int
    others: Iterator[int] | None = None


class Batcher:
    """Runs in one thread, the only one that accesses its state; other threads put messages into `inbox`.

    pixels: uint8 [slots, size, size, 3], filled by the decode pool; there are at least as many slots as images in a
    batch.
    """

    def __init__(self, manifest: Manifest, pixels: NDArray[np.uint8], bad: BadImages, device: torch.device) -> None:
        self.inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._manifest, self._pixels, self._bad, self._device = manifest, pixels, bad, device
        self._labels = torch.tensor(manifest.labels, dtype=torch.int64)
        self._free = list(range(len(pixels)))
        self._wanted: BatchStream | None = None
        self._rows: dict[BatchStream, Iterator[_BatchRow]] = {}  # of the current stream, and of the next
        self._pending: deque[_PendingBatch] = deque()
        self._unsent: deque[_RowRequest] = deque()
        self._sent: dict[int, tuple[_RowRequest, int]] = {}  # ticket -> request, its bytes
        self._tickets = itertools.count()
        self._reading_bytes = 0
        self._error: Exception | None = None

    def run(self, pool: DecodePool) -> None:
        """Process messages until there is None."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (message := self.inbox.get()) is not None:
            try:
                self._take(message, pool)
                if self._error is None:
                    self._send(pool)
                    self._deliver()
            except Exception as error:  # raised in the thread that waits for the next batch
                self._fail(error)

    def _take(self, message: Message, pool: DecodePool) -> None:
        if callable(message):
            message()
        elif not isinstance(message, ProcessDied):
            for result in message:
                pool.complete(result.ticket)
                self._completed(result)
        elif self._error is None:
            self._take(message.replace(), pool)

    # --- streams ---

    def begin(self, stream: BatchStream, then: BatchStream | None) -> None:
        """The training now reads `stream`; `then` is probably the next one."""
        self._wanted = stream
        if self._error is not None:
            stream.ready.put(self._error)
        for other in [*self._rows]:
            if other not in (stream, then):
                self.drop(other)
        for new in (stream, then):
            if new is not None and new not in self._rows:
                self._rows[new] = self._rows_of(new)

    def drop(self, stream: BatchStream) -> None:
        """The training reads no more of a stream: remove it and cancel its unfinished batches."""
        self._rows.pop(stream, None)
        cancelled_batches = [pending for pending in self._pending if pending.stream is stream]
        self._pending = deque(pending for pending in self._pending if pending.stream is not stream)
        for pending in cancelled_batches:
            pending.cancelled = True
            self._release(slot for row, slot in enumerate(pending.slots) if row not in pending.unanswered)
        for request in [request for request in self._unsent if request.pending.cancelled]:
            self._unsent.remove(request)
            self._release([request.slot])

    def _fail(self, error: Exception) -> None:
        self._error = error
        if self._wanted is not None:
            self._wanted.ready.put(error)

    # --- requests and results ---

    def _rows_of(self, stream: BatchStream) -> Iterator[_BatchRow]:
        """Yield all rows of a stream, in order; a batch is in progress from its first row on."""
        for share in stream.shares:
            planned = stream.index[share.index].tolist()
            n = len(planned)
            pending = _PendingBatch(stream, share.total, planned, planned.copy(), [None] * n, set(range(n)))
            self._pending.append(pending)
            for row in range(n):
                yield pending, row

    def _send(self, pool: DecodePool) -> None:
        """Send requests while there are free slots and the decode pool has capacity."""
        while request := self._next_request():
            image, n_bytes = self._image_of(request.pending.shown[request.row])
            is_much = self._reading_bytes > 0 and self._reading_bytes + n_bytes > _MOST_READING_BYTES
            seed = request.pending.stream.seed_of(request.pending.planned[request.row])
            ticket = next(self._tickets)
            if is_much or not pool.put(DecodeRequest(ticket, request.slot, image, seed)):
                self._unsent.appendleft(request)
                break
            self._sent[ticket] = (request, n_bytes)
            self._reading_bytes += n_bytes
        pool.flush()

    def _next_request(self) -> _RowRequest | None:
        while not self._unsent and self._free:
            row = next(itertools.chain.from_iterable(self._rows.values()), None)
            if row is None:
                return None
            self._request_row(*row)
        return self._unsent.popleft() if self._unsent else None

    def _request_row(self, pending: _PendingBatch, row: int) -> None:
        """Request the image of a row. A known bad image is replaced in training, and left out in validation."""
        is_bad = pending.shown[row] in self._bad.reasons
        if is_bad and pending.stream.seed is None:
            pending.bad.add(row)
            pending.unanswered.remove(row)
            return
        request = _RowRequest(pending, row, self._free.pop())
        pending.slots[row] = request.slot
        if is_bad:
            self._request_replacement(request)
        else:
            self._unsent.append(request)

    def _request_replacement(self, request: _RowRequest) -> None:
        """Request a replacement from the same class. Raises TooManyBadImages if there is none."""
        pending, row = request.pending, request.row
        pending.bad.add(row)
        planned, seed = pending.planned[row], pending.stream.seed_of(pending.planned[row])
        others = request.others or self._bad.others(planned, seed or 0)
        pending.shown[row] = next(others)
        self._unsent.append(_RowRequest(pending, row, request.slot, others))

    def _image_of(self, index: int) -> tuple[ImageRef, int]:
        """Return the image to request, and its approximate size in bytes."""
        manifest = self._manifest
        size_bytes = manifest.sizes[index]
        image = ImageRef(manifest.keys[index], size_bytes, manifest.versions[index], manifest.in_val_source(index))
        return image, size_bytes if size_bytes >= 0 else _USUAL_BYTES

    def _completed(self, result: DecodeResult) -> None:
        request, n_bytes = self._sent.pop(result.ticket)
        self._reading_bytes -= n_bytes
        pending = request.pending
        if result.is_away:
            raise StoreUnreachable(
                f"{shorten(result.reason, _LONGEST)}; when it is back, failure.max_restarts or --resume continues from "
                "the newest checkpoint"
            )
        if result.reason:
            self._bad.add(pending.shown[request.row], result.reason)
        if pending.cancelled:
            self._release([request.slot])
        elif result.reason and pending.stream.seed is not None:
            self._request_replacement(request)
        else:
            if result.reason:
                pending.bad.add(request.row)
            pending.unanswered.remove(request.row)

    def _release(self, slots: Iterable[int | None]) -> None:
        self._free.extend(slot for slot in slots if slot is not None)

    # --- batches ---

    def _deliver(self) -> None:
        """Deliver complete batches of the current stream, in order, up to READY of them."""
        while self._pending and self._pending[0].stream is self._wanted:
            pending = self._pending[0]
            if pending.unanswered or pending.stream.n_ready >= READY:
                return
            self._pending.popleft()
            pending.stream.ready.put(self._assembled(pending))
            pending.stream.n_ready += 1
            self._release(pending.slots)

    def _assembled(self, pending: _PendingBatch) -> Batch:
        in_training = pending.stream.seed is not None
        n = len(pending.shown)
        size = self._pixels.shape[1]
        is_cuda = self._device.type == "cuda"
        pixels = torch.empty((max(1, n), size, size, 3), dtype=torch.uint8, pin_memory=is_cuda)
        if n:
            slots = [slot or 0 for slot in pending.slots]
            np.take(self._pixels, slots, axis=0, out=pixels.numpy(), mode="clip")  # mode "raise" makes a second copy
        for row in [0] if n == 0 else [] if in_training else pending.bad:
            pixels[row].zero_()
        index = torch.tensor(pending.shown or [0])
        ok = torch.ones(len(index), dtype=torch.bool)
        ok[[0] if n == 0 else sorted(pending.bad)] = False
        return Batch(
            images=pixels.permute(0, 3, 1, 2),
            labels=self._labels[index],
            index=index,
            ok=ok,
            total=pending.total,
            n_counted=n,
        )
