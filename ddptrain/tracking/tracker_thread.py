"""Runs one tracker in a thread of its own, so that its errors and delays affect nothing else."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from ddptrain.errors import one_line
from ddptrain.protocol import events
from ddptrain.tracking.items import Checkpoint, Item, SharedFiles
from ddptrain.tracking.protocol import Facts, State, Tracker

_POLL_S = 0.1  # the thread polls for items, so that put() in the training thread stays fast
_JOIN_S = 0.25
_MAX_FAILURES = 3  # in a row; then the tracker is turned off
_DRAIN_SHARE = 0.5  # the share of the time for the end that is for items in the queue

Emit = Callable[[events.Event], None]


@dataclass(frozen=True, slots=True)
class TrackerDefinition:
    """A tracker to run. `make` imports and creates it; items of the `declined` types are not passed to it."""

    name: str
    make: Callable[[], Tracker]
    facts: Facts
    finish_timeout_s: float = 30.0
    declined: tuple[type[Item], ...] = (Checkpoint,)


class TrackerThread:
    """Takes items without waiting, and passes them to the tracker in a thread."""

    def __init__(self, definition: TrackerDefinition, emit: Emit, *, limit: int) -> None:
        self.name = definition.name
        self._definition, self._emit, self._limit = definition, emit, limit
        self._queue: deque[tuple[Item, SharedFiles | None]] = deque()
        self._received = self._dropped = self._failures = self._failures_in_a_row = 0
        self._is_off = False
        self._last_error = ""
        self._ending = threading.Event()
        self._reported_at_end = self._abandoned = False
        self._lock = threading.Lock()
        self._state: State = "finished"
        self._deadline = 0.0
        self._activity = "starting"
        self._thread = threading.Thread(target=self._run, name=f"ddptrain-{self.name}", daemon=True)
        self._thread.start()

    def wants(self, kind: type[Item]) -> bool:
        """Return whether the tracker is on and takes items of that type."""
        return not self._is_off and kind not in self._definition.declined

    def put(self, item: Item, files: SharedFiles | None = None) -> None:
        """Add an item to the queue, or drop it if the queue is full. Never waits, never raises."""
        self._received += 1
        if len(self._queue) < self._limit:
            self._queue.append((item, files))
            return
        self._dropped += 1
        if files is not None:
            files.release()
        if self._dropped == 1:
            text = f"{self.name} is too slow: {self._limit} items are in its queue, and further ones are dropped"
            self._warn(f"{text}; the run directory has them")

    def end(self, state: State, within_s: float) -> float:
        """Make the thread pass on the queued items and finish the tracker; return the seconds for that.

        The state of the first call counts. A further call can only shorten the time.
        """
        with self._lock:
            if not self._ending.is_set():
                self._state = state
                self._deadline = time.monotonic() + min(within_s, self._definition.finish_timeout_s)
                self._ending.set()
            else:
                self._deadline = min(self._deadline, time.monotonic() + within_s)
        return max(0.0, self._deadline - time.monotonic())

    def join(self) -> bool:
        """Wait until the tracker has finished or its time is over.

        Return whether it has finished; if not, report that.
        """
        while self._thread.is_alive() and (left_s := self._deadline - time.monotonic()) > 0:
            self._thread.join(min(left_s, _JOIN_S))  # in steps, because end() may shorten the time meanwhile
        if not self._thread.is_alive():
            return True
        missed = len(self._queue) + self._dropped
        rest = f", and {missed} items were not sent" if missed else ""
        with self._lock:
            self._abandoned = True
            quiet = self._reported_at_end
        what = f"has not ended in time ({self._activity}{rest})"
        self._report(what, "ddptrain does not wait any longer", quiet=quiet)
        return False

    # --- in the thread. A library may also raise SystemExit, which must not end the thread silently. ---

    def _run(self) -> None:
        tracker: Tracker | None = None
        try:
            self._definition.facts.folder.mkdir(parents=True, exist_ok=True)
            tracker = self._definition.make()
            tracker.start(replace(self._definition.facts, tell=self._tell))
        except BaseException as error:
            tracker, self._is_off = None, True
            self._report(f"could not start: {describe(error)}", "it is off")
        self._activity = "waiting"
        while not self._ending.wait(_POLL_S):
            self._drain(tracker)
        self._drain(tracker, time.monotonic() + _DRAIN_SHARE * (self._deadline - time.monotonic()))
        problems = []
        if tracker is not None:
            self._activity, was_off = "finishing", self._is_off
            try:
                tracker.finish(self._state)
            except BaseException as error:
                problems = [] if was_off else [f"could not finish: {describe(error)}"]
        consequence = "it lacks the last items" if problems else "it lacks them"
        if self._dropped:
            problems.append(f"was too slow for {self._dropped} of {self._received} items")
        if self._failures and not self._is_off:
            problems.append(f"has failed to take {self._failures} of {self._received} items: {self._last_error}")
        if problems and not self._abandoned:
            self._report(", and ".join(problems), consequence)

    def _drain(self, tracker: Tracker | None, until: float = math.inf) -> None:
        """Pass on all queued items. After `until` (monotonic), or if the tracker is off, drop them."""
        self._activity = "logging"
        while self._queue:
            item, files = self._queue.popleft()
            if tracker is not None and not self._is_off:
                if time.monotonic() > until:
                    self._dropped += 1
                else:
                    self._pass_on(tracker, item)
            if files is not None:
                files.release()
        self._activity = "waiting"

    def _pass_on(self, tracker: Tracker, item: Item) -> None:
        try:
            tracker.log(item)
            self._failures_in_a_row = 0
        except BaseException as error:
            self._failures += 1
            self._failures_in_a_row += 1
            self._last_error = describe(error)
            if self._failures_in_a_row >= _MAX_FAILURES:
                self._is_off = True
                self._report(f"has failed {self._failures_in_a_row} times in a row: {self._last_error}", "it is off")

    def _tell(self, text: str) -> None:
        """Pass on a line of the tracker. Only one of the tracker and join() reports an incomplete end."""
        with self._lock:
            if self._abandoned:
                return
            self._reported_at_end = self._reported_at_end or self._activity == "finishing"
        self._definition.facts.tell(text)

    def _report(self, what: str, consequence: str, *, quiet: bool = False) -> None:
        """Report an error, and print it unless `quiet`: the tracker has already printed it."""
        if not quiet:
            self._warn(f"{self.name} {what}; {consequence}, the run directory has everything")
        with suppress(Exception):  # a full disk; it is reported elsewhere
            self._emit(events.TrackerFailed(time.time_ns(), self.name, what[:2_000]))

    def _warn(self, text: str) -> None:
        with suppress(Exception):  # a full disk; it is reported elsewhere
            self._emit(events.Note(time.time_ns(), text[:4_000], "warning"))


def describe(error: BaseException) -> str:
    """Return the type of an exception and its first line, in at most 1,000 characters."""
    first, kind = one_line(error), type(error).__name__
    return kind if first == kind else f"{kind}: {first}"[:1_000]
