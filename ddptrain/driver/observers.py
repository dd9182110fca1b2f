"""Run observers: objects that take the events and the end of a run: the display, reports for CI, notifications.

An installed package adds its own with an entry point in the group `ddptrain.observers`, which names a class.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ddptrain.errors import one_line
from ddptrain.results.run import Run

GROUP = "ddptrain.observers"
OPENED = "run_opened"  # the first event of a run, which is not in events.jsonl: its directory exists
# What a display shows besides: it is too much for events.jsonl, or about the display itself.
#   ranks {count, offsets, hidden}   the number of ranks; which bytes of their logs, and which ranks, are not shown
#   numbers {rank, numbers}          Metrics, Progress and CheckpointSaved of a rank
#   log_grew {rank}                  the rank has printed something
#   system {sample}                  the use of a host
#   message {level, message}         a notice that is only shown
#   asks_for_line {rank, log_size}   the debugged rank waits for a line of the user; see protocol/events.py
#   silence {message}                for how long a rank has not reported; "": all report
LIVE = frozenset({"ranks", "numbers", "log_grew", "message", "system", "silence", "asks_for_line"})
_END_S = 30.0  # for the observers of packages to take the last events and the end


class RunObserver(Protocol):
    """Takes what happens in a run. It must not wait: the run waits for it."""

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Take a line of events.jsonl, as {"event": "rank_started", "rank": 0, ...}, or one of LIVE."""

    def on_end(self, run: Run) -> None:
        """Take the run, which has ended: `run.record` has the fields of run.json, `run.root` is its folder."""


class InstalledObservers:
    """The observers of installed packages, in a thread of their own, so that they may wait.

    The packages are looked up when an attempt begins, so that this delays no start. An observer that raises an
    exception has one warning, and is not called any more.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._inbox: queue.SimpleQueue[Mapping[str, Any] | Run] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ddptrain-observers", daemon=True)

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Pass the event on."""
        if event["event"] in LIVE:
            return
        is_new = self._thread.ident is None
        if is_new or self._thread.is_alive():  # else there are no observers
            self._inbox.put(event)
        if is_new and event["event"] == "run_started":
            self._thread.start()

    def on_end(self, run: Run) -> None:
        """Pass the end on, and wait until it is taken."""
        self._inbox.put(run)
        if self._thread.ident is None:
            self._thread.start()
        self._thread.join(_END_S)
        if self._thread.is_alive():
            self._warn(f"an observer ({GROUP}) has not taken the end of the run within {_END_S:g} s")

    def _run(self) -> None:
        observers = self._load()
        while observers:
            item = self._inbox.get()
            for name, observer in list(observers.items()):
                try:
                    observer.on_end(item) if isinstance(item, Run) else observer.on_event(item)
                except Exception as error:  # any user's code
                    self._failed(name, error)
                    del observers[name]
            if isinstance(item, Run):
                return

    def _load(self) -> dict[str, RunObserver]:
        from importlib.metadata import entry_points

        found: dict[str, RunObserver] = {}
        for point in entry_points(group=GROUP):
            try:
                found[point.name] = point.load()()
            except Exception as error:  # any user's code
                self._failed(point.name, error)
        return found

    def _failed(self, name: str, error: Exception) -> None:
        self._warn(f"the observer {name} ({GROUP}) has failed: {type(error).__name__}: {one_line(error)}")
