"""The decode pool of a rank: processes that share memory with it, or threads of the rank."""

from __future__ import annotations

import dataclasses
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ddptrain.config.wording import counted
from ddptrain.errors import TrainingFailed
from ddptrain.workloads.images.loader.decode_client import AHEAD, DecodeProcess
from ddptrain.workloads.images.loader.decode_process import DecodeSetup
from ddptrain.workloads.images.loader.pipeline import DecodeRequest, DecodeResult, Pipeline

_MOST_DEATHS_IN_A_ROW = 3  # deaths in a row of the same process without a result
_SUSPECT = 2  # after so many deaths a request is tried once more, alone


@dataclass(frozen=True, slots=True)
class ProcessDied:
    """A process has ended by itself.

    `replace` must be called by the thread that uses the pool: it starts another process with the pending requests, and
    returns the results of requests that are not tried again. It raises DecodeProcessLost if that did not help before.
    """

    replace: Callable[[], Sequence[DecodeResult]]


OnResults = Callable[[Sequence[DecodeResult] | ProcessDied], None]


class DecodeProcessLost(TrainingFailed):
    """Decode processes end by themselves again and again."""


def shared_memory(n_bytes: int) -> int:
    """Return a file descriptor of anonymous memory, which is freed with the last process that has it open."""
    fd = os.memfd_create("ddptrain-images")
    os.ftruncate(fd, n_bytes)
    return fd


class ThreadDecodePool:
    """A decode pool of threads: takes requests and reports results, in threads of its own; used by one thread."""

    def __init__(self, setup: DecodeSetup, decoders: int, on_results: OnResults) -> None:
        self._room = setup.readers + AHEAD * decoders
        pixels = memoryview(mmap.mmap(setup.pixels_fd, 0))
        self._pipeline = Pipeline(
            setup.reader(),
            pixels,
            setup.size,
            setup.augment,
            lambda result: on_results([result]),
            readers=setup.readers,
            decoders=decoders,
        )

    def put(self, request: DecodeRequest) -> bool:
        """Take a request; false if there is no capacity, and the request must be offered again later."""
        if self._room == 0:
            return False
        self._room -= 1
        self._pipeline.put(request)
        return True

    def flush(self) -> None:
        """Start the requests that were put since the last flush."""

    def complete(self, ticket: int) -> None:
        """Free the capacity that a request used."""
        self._room += 1

    def close(self) -> None:
        """End all threads and processes."""
        self._pipeline.close()


class ProcessDecodePool:
    """A decode pool of processes, which share the slots with this process; each reads what it decodes.

    A process that ends by itself is replaced, and its requests are repeated into the same slots. A request that was
    pending in two such processes is repeated alone, and given up if a third ends. `say` gets a line for each death.
    """

    def __init__(self, setup: DecodeSetup, processes: int, on_results: OnResults, say: Callable[[str], None]) -> None:
        self._setup = dataclasses.replace(setup, pixels_fd=os.dup(setup.pixels_fd))
        self._on_results, self._say = on_results, say
        self._lock = threading.Lock()  # held while processes are started, or all are ended
        self._closed = False
        self._owners: dict[int, DecodeProcess] = {}  # ticket -> process that has the request
        self._deaths: Counter[int] = Counter()  # ticket -> processes that ended while they had the request
        self._deaths_in_a_row = [0] * processes  # deaths in a row without a result
        self._decoders: list[DecodeProcess] = []
        for _ in range(processes):
            self._decoders.append(self._start())

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [decoder.popen.pid for decoder in self._decoders]

    def put(self, request: DecodeRequest) -> bool:
        """See ThreadDecodePool."""
        decoder = max(self._decoders, key=lambda decoder: decoder.room)
        if decoder.room <= 0:
            return False
        self._owners[request.ticket] = decoder
        decoder.put(request)
        return True

    def flush(self) -> None:
        """See ThreadDecodePool."""
        for decoder in self._decoders:
            decoder.flush()

    def complete(self, ticket: int) -> None:
        """See ThreadDecodePool."""
        self._deaths.pop(ticket, None)
        if decoder := self._owners.pop(ticket, None):
            decoder.complete(ticket)

    def close(self) -> None:
        """See ThreadDecodePool."""
        with self._lock:
            self._closed = True
        for decoder in self._decoders:
            decoder.close_stdin()
        for decoder in self._decoders:
            decoder.join()
        os.close(self._setup.pixels_fd)

    def _start(self) -> DecodeProcess:
        return DecodeProcess(self._setup, self._on_results, self._on_end)

    def _on_end(self, decoder: DecodeProcess) -> None:
        if not self._closed:
            self._on_results(ProcessDied(partial(self._replace, decoder)))

    def _replace(self, dead: DecodeProcess) -> list[DecodeResult]:
        place = self._decoders.index(dead)
        given_up = self._given_up(dead)
        self._deaths_in_a_row[place] = 0 if given_up else 1 if dead.has_completed else self._deaths_in_a_row[place] + 1
        with self._lock:
            if self._closed:
                return []
            dead.close_stdin()
            dead.join()
            new = self._decoders[place] = self._start_replacement(place, dead, len(dead.pending) - len(given_up))
        left = [request for ticket, request in dead.pending.items() if ticket in self._owners]
        suspects = [request for request in left if self._deaths[request.ticket] >= _SUSPECT]
        self._owners |= {request.ticket: new for request in left}
        new.take_over(suspects, [request for request in left if request not in suspects])
        return given_up

    def _given_up(self, dead: DecodeProcess) -> list[DecodeResult]:
        """Count the death for all pending requests; give up a request that was alone in its process."""
        if not dead.has_begun:
            return []
        if dead.alone is None:
            self._deaths.update(dead.pending.keys())
            return []
        ticket = dead.alone.ticket
        del self._owners[ticket]
        ended = f"{self._deaths[ticket] + 1} decode processes ended while they decoded it"
        return [DecodeResult(ticket, f"{ended}; the last one, with only this image, {dead.end}")]

    def _start_replacement(self, place: int, dead: DecodeProcess, n_left: int) -> DecodeProcess:
        """Return a new process in place of a dead one that has left `n_left` requests. Raises DecodeProcessLost."""
        is_killed = dead.end.endswith("SIGKILL")
        memory = "; the system may have been out of memory" if is_killed else ""
        problem = f"decode process {place + 1} of {len(self._decoders)} (pid {dead.popen.pid}) {dead.end}{memory}"
        hint = "lower params.loader_workers, params.batch_size or params.requests"
        if self._deaths_in_a_row[place] > _MOST_DEATHS_IN_A_ROW:
            n = self._deaths_in_a_row[place]
            raise DecodeProcessLost(f"{problem}, {n} in a row without an image: {hint}, or see its output above")
        try:
            another = self._start()
        except OSError as error:
            raise DecodeProcessLost(f"{problem}, and no other one can be started ({error}): {hint}") from None
        images = f"does its {counted(n_left, 'image')} again" if n_left else "goes on"
        self._say(
            f"{problem}{f': {hint}, if it goes on' if is_killed else ''}; another one takes its place, and {images}"
        )
        return another


DecodePool = ThreadDecodePool | ProcessDecodePool
