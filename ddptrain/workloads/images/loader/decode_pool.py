"""Who decodes for a rank: processes of their own, which share memory with it, or threads of the rank."""

from __future__ import annotations

import dataclasses
import mmap
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ddptrain.config.wording import counted
from ddptrain.errors import TrainingFailed
from ddptrain.workloads.images.loader.decode_process import Setup
from ddptrain.workloads.images.loader.decode_worker import AHEAD, Decoder
from ddptrain.workloads.images.loader.pipeline import Answer, Order, Pipeline

_MOST_FRUITLESS = 3  # deaths in a row without an answer between them
_SUSPECT = 2  # deaths, after which an order is tried once more, by a process that has nothing else


@dataclass(frozen=True, slots=True)
class Died:
    """A process has ended by itself.

    `replaced`, for the thread that uses the crew, has another one do its orders, and answers those that are given up.
    It raises DecodeProcessLost where that has not helped before.
    """

    replaced: Callable[[], Sequence[Answer]]


Tell = Callable[[Sequence[Answer] | Died], None]


class DecodeProcessLost(TrainingFailed):
    """Processes that decode images go on ending by themselves."""


class Crew(Protocol):
    """Takes orders and tells of their answers, in threads of its own; used by one thread."""

    def put(self, order: Order) -> bool:
        """Take an order; false where all have enough to do, and the order is to be offered again."""
        ...

    def flush(self) -> None:
        """Begin with the orders that were put since the last time."""
        ...

    def answered(self, ticket: int) -> None:
        """Whoever had that order has room for another one."""
        ...

    def close(self) -> None:
        """End all threads and processes."""
        ...


def shared_memory(n_bytes: int) -> int:
    """A descriptor of memory that has no name, and goes with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("ddptrain-images")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, n_bytes)
    return fd


class ThreadCrew:
    """Threads of this process."""

    def __init__(self, setup: Setup, decoders: int, tell: Tell) -> None:
        self._room = setup.readers + AHEAD * decoders
        pixels = memoryview(mmap.mmap(setup.pixels_fd, 0))
        self._pipeline = Pipeline(
            setup.reader(),
            pixels,
            setup.size,
            setup.augment,
            lambda answer: tell([answer]),
            readers=setup.readers,
            decoders=decoders,
        )

    def put(self, order: Order) -> bool:
        """See Crew."""
        if self._room == 0:
            return False
        self._room -= 1
        self._pipeline.put(order)
        return True

    def flush(self) -> None:
        """See Crew."""

    def answered(self, ticket: int) -> None:
        """See Crew."""
        self._room += 1

    def close(self) -> None:
        """See Crew."""
        self._pipeline.close()


class ProcessCrew:
    """Processes that have the slots in common with this one; each reads what it decodes.

    One that ends by itself is replaced, and its orders are done again, into the same slots: nothing else shows it. An
    order that two have ended with is tried alone, and given up where that ends a third. `say` gets a line for each.
    """

    def __init__(self, setup: Setup, processes: int, tell: Tell, say: Callable[[str], None]) -> None:
        self._setup = dataclasses.replace(setup, pixels_fd=os.dup(setup.pixels_fd))
        self._tell, self._say = tell, say
        self._lock = threading.Lock()  # who has it starts processes, or ends them all
        self._closed = False
        self._who: dict[int, Decoder] = {}  # ticket -> who has it in hand
        self._deaths: Counter[int] = Counter()  # ticket -> processes that have ended with it in hand
        self._fruitless = [0] * processes  # deaths without an answer between them
        self._decoders: list[Decoder] = []
        for _ in range(processes):
            self._decoders.append(self._started())

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [decoder.popen.pid for decoder in self._decoders]

    def put(self, order: Order) -> bool:
        """See Crew."""
        decoder = max(self._decoders, key=lambda decoder: decoder.room)
        if decoder.room <= 0:
            return False
        self._who[order.ticket] = decoder
        decoder.put(order)
        return True

    def flush(self) -> None:
        """See Crew."""
        for decoder in self._decoders:
            decoder.flush()

    def answered(self, ticket: int) -> None:
        """See Crew."""
        self._deaths.pop(ticket, None)
        if decoder := self._who.pop(ticket, None):
            decoder.answered(ticket)

    def close(self) -> None:
        """See Crew."""
        with self._lock:
            self._closed = True
        for decoder in self._decoders:
            decoder.hang_up()
        for decoder in self._decoders:
            decoder.join()
        os.close(self._setup.pixels_fd)

    def _started(self) -> Decoder:
        return Decoder(self._setup, self._tell, self._ended)

    def _ended(self, decoder: Decoder) -> None:
        if not self._closed:
            self._tell(Died(partial(self._replaced, decoder)))

    def _replaced(self, dead: Decoder) -> list[Answer]:
        place = self._decoders.index(dead)
        given_up = self._given_up(dead)
        self._fruitless[place] = 0 if given_up else 1 if dead.has_answered else self._fruitless[place] + 1
        with self._lock:
            if self._closed:
                return []
            dead.hang_up()
            dead.join()
            new = self._decoders[place] = self._another(place, dead, len(dead.in_hand) - len(given_up))
        left = [order for ticket, order in dead.in_hand.items() if ticket in self._who]
        suspects = [order for order in left if self._deaths[order.ticket] >= _SUSPECT]
        self._who |= {order.ticket: new for order in left}
        new.take_over(suspects, [order for order in left if order not in suspects])
        return given_up

    def _given_up(self, dead: Decoder) -> list[Answer]:
        """Counts against its orders that a process has ended, and gives the one up that is to blame for certain."""
        if not dead.has_begun:
            return []
        if dead.alone is None:
            self._deaths.update(dead.in_hand.keys())
            return []
        ticket = dead.alone.ticket
        del self._who[ticket]
        each = f"each of {self._deaths[ticket] + 1} decode processes that had it in hand has ended"
        reason = f"{each}; the last one, which had nothing else, {dead.how}"
        return [Answer(ticket, reason)]

    def _another(self, place: int, dead: Decoder, n_left: int) -> Decoder:
        """One in the place of a dead one that has left so many orders. Raises: DecodeProcessLost."""
        is_killed = dead.how.endswith("SIGKILL")
        memory = "; the system may have been out of memory" if is_killed else ""
        said = f"decode process {place + 1} of {len(self._decoders)} (pid {dead.popen.pid}) {dead.how}{memory}"
        hint = "lower params.loader_workers, params.prefetch or params.requests"
        if self._fruitless[place] > _MOST_FRUITLESS:
            n = self._fruitless[place]
            raise DecodeProcessLost(f"{said}, {n} in a row without an image: {hint}, or see above what it has said")
        try:
            another = self._started()
        except OSError as error:
            raise DecodeProcessLost(f"{said}, and no other one can be started ({error}): {hint}") from None
        images = f"does its {counted(n_left, 'image')} again" if n_left else "goes on"
        self._say(f"{said}{f': {hint}, if it goes on' if is_killed else ''}; another one takes its place, and {images}")
        return another
