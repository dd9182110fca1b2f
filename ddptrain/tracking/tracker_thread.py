"""One tracker and its thread: whatever it does, and does not do, it does to itself alone."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ddptrain.protocol import events
from ddptrain.tracking.items import Checkpoint, Item, Model
from ddptrain.tracking.protocol import Facts, State, Tracker
from ddptrain.tracking.temp_files import Loan

_PAUSE_S = 0.1  # between two looks: what is logged in between costs the training thread no wake-up
_PATIENCE_S = 0.25
_MOST_FAILURES = 3  # in a row, after which a tracker is off
_DRAIN_SHARE = 0.5  # of the time for the end, which what still waits may take

Emit = Callable[[events.Event], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tracker that is on; `make` imports and makes it. Items of `declined` types are not for it."""

    name: str
    make: Callable[[], Tracker]
    facts: Facts
    finish_timeout_s: float = 30.0
    declined: tuple[type[Item], ...] = (Checkpoint, Model)


class Lane:
    """Takes items without ever waiting, and hands them to its tracker in a thread of their own."""

    def __init__(self, wanted: Wanted, emit: Emit, *, limit: int, strict: bool = False) -> None:
        self.name = wanted.name
        self.error = ""  # the first thing that went wrong
        self.dropped = 0
        self._wanted = wanted
        self._emit = emit
        self._limit = limit
        self._strict = strict
        self._waiting: deque[tuple[Item, Loan | None]] = deque()
        self._taken = self._failures = self._in_a_row = 0
        self._off = False
        self._last_error = ""
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._state: State = "finished"
        self._until = 0.0
        self._thread = threading.Thread(target=self._run, name=f"ddptrain-{self.name}", daemon=True)

    def begin(self) -> None:
        """Start the tracker, in its thread."""
        self._thread.start()

    def wants(self, kind: type[Item]) -> bool:
        """Whether items of that type are for this tracker, and it is on."""
        return not self._off and kind not in self._wanted.declined

    def put(self, item: Item, loan: Loan | None = None) -> None:
        """Take an item if there is room. Never waits, never raises."""
        self._taken += 1
        if len(self._waiting) < self._limit:
            self._waiting.append((item, loan))
        else:
            self._drop(loan)
            if self.dropped == 1:
                text = f"{self.name} is behind: {self._limit} things wait for it; what comes now is left out there"
                self._note(f"{text}, the run directory has it", "warning")

    def end(self, state: State, within_s: float) -> float:
        """Have the tracker take what waits, and finish; returns the seconds that it has for it. Said once."""
        with self._lock:
            if not self._ending.is_set():
                self._state = state
                self._until = time.monotonic() + min(within_s, self._wanted.finish_timeout_s)
                self._ending.set()
            else:
                self._until = min(self._until, time.monotonic() + within_s)
        return max(0.0, self._until - time.monotonic())

    def over(self) -> bool:
        """Wait until the tracker has finished, or its time is over; whether it has. Of one that has not is told."""
        while self._thread.is_alive() and (left_s := self._until - time.monotonic()) > 0:
            self._thread.join(min(left_s, _PATIENCE_S))  # the time may be shortened meanwhile
        if not self._thread.is_alive():
            return True
        rest = f", with {len(self._waiting) + self.dropped} things not taken" if self._waiting or self.dropped else ""
        self._failed(f"has not ended in time ({self._doing}{rest})", "it is left behind")
        return False

    # --- in the thread ---

    _doing = "waiting"

    def _run(self) -> None:
        tracker = self._started()
        while tracker is not None and not self._ending.wait(_PAUSE_S):
            self._drain(tracker, None)
        self._ending.wait()
        problem = ""
        if tracker is not None:
            self._drain(tracker, time.monotonic() + _DRAIN_SHARE * (self._until - time.monotonic()))
            problem = self._finish(tracker)
        self._empty()
        self._tell_what_is_missing(problem)

    def _started(self) -> Tracker | None:
        self._doing = "starting"
        try:
            self._wanted.facts.folder.mkdir(parents=True, exist_ok=True)
            tracker = self._wanted.make()
            tracker.start(self._wanted.facts)
        except BaseException as error:  # a library's SystemExit as well: the thread is ours
            self._turn_off()
            self._failed(f"could not start: {in_words(error)}", "it is off")
            return None
        self._doing = "waiting"
        return tracker

    def _drain(self, tracker: Tracker, until: float | None) -> None:
        """Hand over what waits, until there is nothing left, or no time; then the rest is dropped."""
        self._doing = "logging"
        while self._waiting:
            item, loan = self._waiting.popleft()
            if until is not None and time.monotonic() > until:
                self._drop(loan)
                continue
            if not self._off:
                self._hand_over(tracker, item)
            if loan is not None:
                loan.back()
        self._doing = "waiting"

    def _hand_over(self, tracker: Tracker, item: Item) -> None:
        try:
            tracker.log(item)
        except BaseException as error:
            self._failures += 1
            self._in_a_row += 1
            self._last_error = in_words(error)
            self.error = self.error or self._last_error
            if self._in_a_row >= _MOST_FAILURES:
                self._turn_off()
                self._failed(f"has failed {self._in_a_row} times in a row: {self._last_error}", "it is off")
        else:
            self._in_a_row = 0

    def _finish(self, tracker: Tracker) -> str:
        """Have it finish; returns what went wrong, unless that has been told."""
        self._doing = "finishing"
        was_off = self._off
        try:
            tracker.finish(self._state)
        except BaseException as error:
            return "" if was_off else f"could not finish: {in_words(error)}"
        return ""

    def _turn_off(self) -> None:
        """From now on what is put here goes nowhere."""
        self._off = True
        self._empty()

    def _empty(self) -> None:
        with suppress(IndexError):
            while True:
                _, loan = self._waiting.popleft()
                if loan is not None:
                    loan.back()

    def _drop(self, loan: Loan | None) -> None:
        self.dropped += 1
        if loan is not None:
            loan.back()

    # --- what the person is told ---

    def _failed(self, what: str, then: str) -> None:
        self.error = self.error or what
        self._note(f"{self.name} {what}; {then}, the run directory has everything", "warning")
        with suppress(Exception):  # a full disk, which is told of elsewhere
            self._emit(events.TrackerFailed(time.time_ns(), self.name, what[:2_000], self._strict))

    def _tell_what_is_missing(self, problem: str) -> None:
        """Once, at the end, all of it: `problem` is that of the finish."""
        found = [problem] if problem else []
        if self.dropped:
            found.append(f"was too slow for {self.dropped} of {self._taken} things")
        if self._failures and not self._off:
            found.append(f"has failed to take {self._failures} of {self._taken} things: {self._last_error}")
        if found:
            self._failed(", and ".join(found), "it lacks what came last" if found == [problem] else "it lacks them")

    def _note(self, text: str, level: str) -> None:
        with suppress(Exception):
            self._emit(events.Note(time.time_ns(), text[:4_000], level))


def in_words(error: BaseException) -> str:
    """An exception's type and its first line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"[:1_000] if first else type(error).__name__
