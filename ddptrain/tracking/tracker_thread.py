"""Runs one tracker in a thread of its own, so that its errors and delays affect nothing else."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from ddptrain.errors import one_line
from ddptrain.protocol import events
from ddptrain.tracking.items import Checkpoint, Item, Model
from ddptrain.tracking.protocol import Facts, State, Tracker
from ddptrain.tracking.temp_files import SharedFiles

_POLL_S = 0.1  # items are polled: put() in the training thread needs no wake-up call
_JOIN_S = 0.25
_MAX_FAILURES = 3  # in a row; then the tracker is turned off
_DRAIN_SHARE = 0.5  # of the time for the end: for items that still wait

Emit = Callable[[events.Event], None]


@dataclass(frozen=True, slots=True)
class TrackerDefinition:
    """A tracker to run. `make` imports and creates it; items of the `declined` types are not passed to it."""

    name: str
    make: Callable[[], Tracker]
    facts: Facts
    finish_timeout_s: float = 30.0
    declined: tuple[type[Item], ...] = (Checkpoint, Model)


class TrackerThread:
    """Takes items without waiting, and passes them to the tracker in a thread."""

    def __init__(self, definition: TrackerDefinition, emit: Emit, *, limit: int, strict: bool = False) -> None:
        self.name = definition.name
        self.error = ""  # the first error
        self.dropped = 0
        self._definition = definition
        self._emit = emit
        self._limit = limit
        self._strict = strict
        self._waiting: deque[tuple[Item, SharedFiles | None]] = deque()
        self._taken = self._failures = self._failures_in_a_row = 0
        self._off = False
        self._last_error = ""
        self._ending = threading.Event()
        self._told_at_end = self._abandoned = False
        self._lock = threading.Lock()
        self._state: State = "finished"
        self._until = 0.0
        self._doing = "waiting"
        self._thread = threading.Thread(target=self._run, name=f"ddptrain-{self.name}", daemon=True)

    def start(self) -> None:
        """Starts the thread, which starts the tracker."""
        self._thread.start()

    def wants(self, kind: type[Item]) -> bool:
        """Whether the tracker is on and takes items of that type."""
        return not self._off and kind not in self._definition.declined

    def put(self, item: Item, files: SharedFiles | None = None) -> None:
        """Takes an item if there is room. Never waits, never raises."""
        self._taken += 1
        if len(self._waiting) < self._limit:
            self._waiting.append((item, files))
            return
        self._drop(files)
        if self.dropped == 1:
            text = f"{self.name} is too slow: {self._limit} items wait for it, and it does not get further ones"
            self._note(f"{text}; the run directory has them", "warning")

    def end(self, state: State, within_s: float) -> float:
        """Makes the tracker take what waits, and finish; returns the seconds that it has for it.

        The state of the first call counts. A further call can only shorten the time.
        """
        with self._lock:
            if not self._ending.is_set():
                self._state = state
                self._until = time.monotonic() + min(within_s, self._definition.finish_timeout_s)
                self._ending.set()
            else:
                self._until = min(self._until, time.monotonic() + within_s)
        return max(0.0, self._until - time.monotonic())

    def join(self) -> bool:
        """Waits until the tracker has finished or its time is over. Returns whether it has, and reports if not."""
        while self._thread.is_alive() and (left_s := self._until - time.monotonic()) > 0:
            self._thread.join(min(left_s, _JOIN_S))  # in steps: end() may shorten the time meanwhile
        if not self._thread.is_alive():
            return True
        missed = len(self._waiting) + self.dropped
        rest = f", and {missed} items were not sent" if missed else ""
        with self._lock:
            self._abandoned = True
            quiet = self._told_at_end
        self._report(f"has not ended in time ({self._doing}{rest})", "ddptrain does not wait any longer", quiet=quiet)
        return False

    # --- in the thread ---

    def _run(self) -> None:
        tracker = self._start_tracker()
        while tracker is not None and not self._ending.wait(_POLL_S):
            self._drain(tracker, None)
        self._ending.wait()
        problem = ""
        if tracker is not None:
            self._drain(tracker, time.monotonic() + _DRAIN_SHARE * (self._until - time.monotonic()))
            problem = self._finish(tracker)
        self._clear()
        self._report_losses(problem)

    def _start_tracker(self) -> Tracker | None:
        self._doing = "starting"
        try:
            self._definition.facts.folder.mkdir(parents=True, exist_ok=True)
            tracker = self._definition.make()
            tracker.start(replace(self._definition.facts, tell=self._tell))
        except BaseException as error:  # also SystemExit of a library: it must not end this thread silently
            self._turn_off()
            self._report(f"could not start: {describe(error)}", "it is off")
            return None
        self._doing = "waiting"
        return tracker

    def _drain(self, tracker: Tracker, until: float | None) -> None:
        """Passes on what waits. After `until` (monotonic) the rest is dropped."""
        self._doing = "logging"
        while self._waiting:
            item, files = self._waiting.popleft()
            if until is not None and time.monotonic() > until:
                self._drop(files)
                continue
            if not self._off:
                self._pass_on(tracker, item)
            if files is not None:
                files.release()
        self._doing = "waiting"

    def _pass_on(self, tracker: Tracker, item: Item) -> None:
        try:
            tracker.log(item)
        except BaseException as error:  # also SystemExit of a library: it must not end this thread silently
            self._failures += 1
            self._failures_in_a_row += 1
            self._last_error = describe(error)
            self.error = self.error or self._last_error
            if self._failures_in_a_row >= _MAX_FAILURES:
                self._turn_off()
                self._report(f"has failed {self._failures_in_a_row} times in a row: {self._last_error}", "it is off")
        else:
            self._failures_in_a_row = 0

    def _finish(self, tracker: Tracker) -> str:
        """Returns the error, or "" if there is none or it was reported before."""
        self._doing = "finishing"
        was_off = self._off
        try:
            tracker.finish(self._state)
        except BaseException as error:  # also SystemExit of a library: it must not end this thread silently
            return "" if was_off else f"could not finish: {describe(error)}"
        return ""

    def _turn_off(self) -> None:
        self._off = True
        self._clear()

    def _clear(self) -> None:
        with suppress(IndexError):
            while True:
                _, files = self._waiting.popleft()
                if files is not None:
                    files.release()

    def _drop(self, files: SharedFiles | None) -> None:
        self.dropped += 1
        if files is not None:
            files.release()

    # --- reports to the user ---

    def _tell(self, text: str) -> None:
        """Passes on a line of the tracker. The end is reported once: by the tracker, or by join() if it is late."""
        with self._lock:
            if self._abandoned:
                return
            self._told_at_end = self._told_at_end or self._doing == "finishing"
        self._definition.facts.tell(text)

    def _report(self, what: str, consequence: str, *, quiet: bool = False) -> None:
        """Records an error, and prints it unless `quiet`: then the tracker has printed it."""
        self.error = self.error or what
        if not quiet:
            self._note(f"{self.name} {what}; {consequence}, the run directory has everything", "warning")
        with suppress(Exception):  # a full disk; it is reported elsewhere
            self._emit(events.TrackerFailed(time.time_ns(), self.name, what[:2_000], self._strict))

    def _report_losses(self, problem: str) -> None:
        """One report at the end about everything that the tracker lacks; `problem` is the error of finish()."""
        found = [problem] if problem else []
        if self.dropped:
            found.append(f"was too slow for {self.dropped} of {self._taken} items")
        if self._failures and not self._off:
            found.append(f"has failed to take {self._failures} of {self._taken} items: {self._last_error}")
        if found and not self._abandoned:
            self._report(", and ".join(found), "it lacks the last items" if found == [problem] else "it lacks them")

    def _note(self, text: str, level: str) -> None:
        with suppress(Exception):  # a full disk; it is reported elsewhere
            self._emit(events.Note(time.time_ns(), text[:4_000], level))


def describe(error: BaseException) -> str:
    """The type of an exception and its first line, in at most 1,000 characters."""
    first, kind = one_line(error), type(error).__name__
    return kind if first == kind else f"{kind}: {first}"[:1_000]
