"""Where batches are put together: one thread that sends orders ahead, takes answers, and copies what is complete."""

from __future__ import annotations

import itertools
import queue
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddptrain.config.wording import shown
from ddptrain.storage.base import StoreUnreachable
from ddptrain.workloads.images.loader.bad_images import BadImages
from ddptrain.workloads.images.loader.batch_plan import Share
from ddptrain.workloads.images.loader.decode_pool import Crew, Died
from ddptrain.workloads.images.loader.pipeline import Answer, Order
from ddptrain.workloads.images.loader.reader import Wanted

if TYPE_CHECKING:
    from ddptrain.workloads.images.data.manifest import Manifest

READY = 2  # batches that wait for the training, complete
_MOST_READING_BYTES = 256 << 20  # of encoded images, ordered and not yet decoded
_USUAL_BYTES = 1 << 20  # of an image whose size the store did not tell
_LONGEST = 700  # of what a store has said, in characters


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of one step.

    A rank that has no image in a step gets one row of zeros, and `n_counted` 0: DDP waits for every rank.

    images: uint8 [n, 3, size, size], in channels_last memory; pinned where the rank has a GPU.
    labels: int64 [n], places in manifest.classes.
    index: int64 [n], places in manifest.keys: of the image that is shown, also where it replaces another.
    ok: bool [n], false where an image could not be had: another of its class is shown, or in validation zeros are.
    total: images of all ranks in this step, as planned.
    n_counted: rows that show, or should show, an image: all, or none.
    """

    images: Tensor
    labels: Tensor
    index: Tensor
    ok: Tensor
    total: int
    n_counted: int


@dataclass(eq=False, slots=True)
class Stream:
    """The batches of an epoch, or of a validation; `seed` is that of an epoch's augmentation, None shows centres.

    index: int64, places in manifest.keys that the shares' places stand for.
    """

    name: tuple[object, ...]
    shares: Sequence[Share]
    index: Tensor
    seed: int | None
    ready: queue.SimpleQueue[Batch | Exception] = field(default_factory=queue.SimpleQueue)
    n_ready: int = 0  # known to the assembler alone

    def seed_of(self, index: int) -> int | None:
        """What the image that was planned draws from, whoever decodes it."""
        return None if self.seed is None else (self.seed << 32) | index


@dataclass(frozen=True, slots=True)
class Begin:
    """The training wants this stream now; `then` probably comes after it."""

    stream: Stream
    then: Stream | None


@dataclass(frozen=True, slots=True)
class Taken:
    """The training has taken a batch of this stream."""

    stream: Stream


@dataclass(frozen=True, slots=True)
class End:
    """The training wants no more of this stream."""

    stream: Stream


class Stop:
    """The last word."""


_Row = tuple["_Making", int]
Message = Begin | Taken | End | Stop | Sequence[Answer] | Died


@dataclass(eq=False, slots=True)
class _Making:
    """A batch under way; a row has no slot where its image is known to be bad, and nothing stands in for it."""

    stream: Stream
    total: int
    planned: Sequence[int]
    shown: list[int]
    slots: list[int | None]
    unanswered: set[int]  # rows
    bad: set[int] = field(default_factory=set)  # rows
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class _Place:
    """What an order is for: a row of a batch, and the images that may stand in for the one that it shows now."""

    making: _Making
    row: int
    slot: int
    others: Iterator[int] | None = None


class Assembler:
    """Run by one thread, which alone touches it; everyone else writes to `inbox`.

    pixels: uint8 [slots, size, size, 3], which the crew fills; at least as many slots as a batch has images.
    """

    def __init__(self, manifest: Manifest, pixels: NDArray[np.uint8], bad: BadImages, device: torch.device) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._manifest, self._pixels, self._bad, self._device = manifest, pixels, bad, device
        self._labels = torch.tensor(manifest.labels, dtype=torch.int64)
        self._free = list(range(len(pixels)))
        self._wanted: Stream | None = None
        self._rows: dict[Stream, Iterator[_Row]] = {}  # of the one that is wanted, and the next
        self._makings: deque[_Making] = deque()
        self._unsent: deque[_Place] = deque()
        self._sent: dict[int, tuple[_Place, int]] = {}  # ticket -> the place, bytes
        self._tickets = itertools.count()
        self._reading_bytes = 0
        self._fault: Exception | None = None

    def run(self, crew: Crew) -> None:
        """Work until Stop."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while not isinstance(message := self.inbox.get(), Stop):
            try:
                self._take(message, crew)
                if self._fault is None:
                    self._send(crew)
                    self._deliver()
            except Exception as error:
                self._fail(error)

    def _take(self, message: Message, crew: Crew) -> None:
        match message:
            case Begin():
                self._begin(message.stream, message.then)
            case Taken():
                message.stream.n_ready -= 1
            case End():
                self._drop(message.stream)
            case Died():
                if self._fault is None:
                    self._take(message.replaced(), crew)
            case _:
                for answer in cast("Sequence[Answer]", message):
                    crew.answered(answer.ticket)
                    self._answered(answer)

    # --- what is wanted ---

    def _begin(self, stream: Stream, then: Stream | None) -> None:
        self._wanted = stream
        if self._fault is not None:
            stream.ready.put(self._fault)
        for other in [*self._rows]:
            if other not in (stream, then):
                self._drop(other)
        for new in (stream, then):
            if new is not None and new not in self._rows:
                self._rows[new] = self._rows_of(new)

    def _drop(self, stream: Stream) -> None:
        """Forget a stream: what is being made of it is not wanted any more."""
        self._rows.pop(stream, None)
        dropped = [making for making in self._makings if making.stream is stream]
        self._makings = deque(making for making in self._makings if making.stream is not stream)
        for making in dropped:
            making.cancelled = True
            self._release(slot for row, slot in enumerate(making.slots) if row not in making.unanswered)
        for place in [place for place in self._unsent if place.making.cancelled]:
            self._unsent.remove(place)
            self._release([place.slot])

    def _fail(self, error: Exception) -> None:
        self._fault = error
        if self._wanted is not None:
            self._wanted.ready.put(error)

    # --- orders and answers ---

    def _rows_of(self, stream: Stream) -> Iterator[_Row]:
        """Every row of a stream, in order; a batch is under way once its first row is asked for."""
        for share in stream.shares:
            planned = stream.index[share.index].tolist()
            n = len(planned)
            making = _Making(stream, share.total, planned, planned.copy(), [None] * n, set(range(n)))
            self._makings.append(making)
            for row in range(n):
                yield making, row

    def _send(self, crew: Crew) -> None:
        """Orders, as long as there are slots for them and somebody has time."""
        while place := self._next_place():
            wanted, n_bytes = self._wanted_image(place.making.shown[place.row])
            is_much = self._reading_bytes > 0 and self._reading_bytes + n_bytes > _MOST_READING_BYTES
            seed = place.making.stream.seed_of(place.making.planned[place.row])
            ticket = next(self._tickets)
            if is_much or not crew.put(Order(ticket, place.slot, wanted, seed)):
                self._unsent.appendleft(place)
                break
            self._sent[ticket] = (place, n_bytes)
            self._reading_bytes += n_bytes
        crew.flush()

    def _next_place(self) -> _Place | None:
        while not self._unsent and self._free:
            row = next(itertools.chain.from_iterable(self._rows.values()), None)
            if row is None:
                return None
            self._give_slot(*row)
        return self._unsent.popleft() if self._unsent else None

    def _give_slot(self, making: _Making, row: int) -> None:
        """Make a row an order to be sent; one that shows a bad image of which we know shows another, or nothing."""
        if making.shown[row] not in self._bad.reasons:
            place = _Place(making, row, self._free.pop())
            making.slots[row] = place.slot
            self._unsent.append(place)
        elif making.stream.seed is None:
            making.bad.add(row)
            making.unanswered.remove(row)
        else:
            place = _Place(making, row, self._free.pop())
            making.slots[row] = place.slot
            self._show_another(place)

    def _show_another(self, place: _Place) -> None:
        """Have another image of its class stand in. Raises TooManyBadImages where there is none."""
        making, row = place.making, place.row
        making.bad.add(row)
        planned, seed = making.planned[row], making.stream.seed_of(making.planned[row])
        others = place.others or self._bad.others(planned, seed or 0)
        making.shown[row] = next(others)
        self._unsent.append(_Place(making, row, place.slot, others))

    def _wanted_image(self, index: int) -> tuple[Wanted, int]:
        """What to ask for, and about how many bytes that is."""
        size_bytes = self._manifest.sizes[index]
        manifest = self._manifest
        wanted = Wanted(manifest.keys[index], size_bytes, manifest.versions[index], manifest.in_val_source(index))
        return wanted, size_bytes if size_bytes >= 0 else _USUAL_BYTES

    def _answered(self, answer: Answer) -> None:
        place, n_bytes = self._sent.pop(answer.ticket)
        self._reading_bytes -= n_bytes
        making = place.making
        if answer.is_away:
            raise StoreUnreachable(
                f"{shown(answer.reason, _LONGEST)}; once it is back, failure.max_restarts or --resume goes on from the "
                "newest checkpoint"
            )
        if answer.reason:
            self._bad.add(making.shown[place.row], answer.reason)
        if making.cancelled:
            self._release([place.slot])
        elif answer.reason and making.stream.seed is not None:
            self._show_another(place)
        else:
            if answer.reason:
                making.bad.add(place.row)
            making.unanswered.remove(place.row)

    def _release(self, slots: Iterable[int | None]) -> None:
        self._free.extend(slot for slot in slots if slot is not None)

    # --- batches ---

    def _deliver(self) -> None:
        """Batches of the stream that is wanted, in order, as they are complete and as far as anyone waits for them."""
        while self._makings and self._makings[0].stream is self._wanted:
            making = self._makings[0]
            if making.unanswered or making.stream.n_ready >= READY:
                return
            self._makings.popleft()
            making.stream.ready.put(self._assembled(making))
            making.stream.n_ready += 1
            self._release(making.slots)

    def _assembled(self, making: _Making) -> Batch:
        in_training = making.stream.seed is not None
        n = len(making.shown)
        size = self._pixels.shape[1]
        is_cuda = self._device.type == "cuda"
        pixels = torch.empty((max(1, n), size, size, 3), dtype=torch.uint8, pin_memory=is_cuda)
        if n:
            slots = [slot or 0 for slot in making.slots]
            np.take(self._pixels, slots, axis=0, out=pixels.numpy(), mode="clip")  # "raise" would copy twice
        for row in [0] if n == 0 else [] if in_training else making.bad:
            pixels[row].zero_()
        index = torch.tensor(making.shown or [0])
        ok = torch.ones(len(index), dtype=torch.bool)
        ok[[0] if n == 0 else sorted(making.bad)] = False
        return Batch(
            images=pixels.permute(0, 3, 1, 2),
            labels=self._labels[index],
            index=index,
            ok=ok,
            total=making.total,
            n_counted=n,
        )
