"""Trackers for tests, good and bad, and a manager that they run in."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddptrain.protocol import events
from ddptrain.tracking.protocol import Facts, Item, Numbers, State, Tracker
from ddptrain.tracking.trackers import TrackerDefinition, TrackerManager


def facts(folder: Path, **changes: Any) -> Facts:
    """Those of rank 0 of 1."""
    rank = {"rank": 0, "world_size": 1, "local_rank": 0, "node_rank": 0, "hosts": 1, "attempt": 1}
    return Facts(**{"run_id": "run-1", "name": "run", "folder": folder, **rank, **changes})


def numbers(step: int) -> Numbers:
    """What a step logs."""
    return Numbers(time.time_ns(), {"loss": 1 / (step + 1)}, step)


class Recorder:
    """Keeps what it is given, and where; the other trackers are this one with a fault."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = options or {}
        self.facts: Facts | None = None
        self.items: list[Item] = []
        self.states: list[State] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()  # for those that hang
        self.timeout_s: float | None = None  # where it is not that of the others

    def start(self, facts: Facts) -> None:
        self.threads.add(threading.get_ident())
        self.facts = facts

    def log(self, item: Item) -> None:
        self.threads.add(threading.get_ident())
        self.items.append(item)

    def finish(self, state: State) -> None:
        self.threads.add(threading.get_ident())
        self.states.append(state)

    @property
    def steps(self) -> list[int | None]:
        return [item.step for item in self.items if isinstance(item, Numbers)]


class Failing(Recorder):
    """Raises `error` in those calls of log whose step is among `steps`; all of them, where that is None."""

    def __init__(self, steps: set[int] | None, error: BaseException) -> None:
        super().__init__()
        self.bad_steps = steps
        self.error = error
        self.calls = 0

    def log(self, item: Item) -> None:
        self.calls += 1
        if self.bad_steps is None or (isinstance(item, Numbers) and item.step in self.bad_steps):
            raise self.error
        super().log(item)


class Hanging(Recorder):
    """Hangs in one of its methods until `gate` is set."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.hangs = threading.Event()

    def start(self, facts: Facts) -> None:
        super().start(facts)
        self._hang("start")

    def log(self, item: Item) -> None:
        super().log(item)
        self._hang("log")

    def finish(self, state: State) -> None:
        super().finish(state)
        self._hang("finish")

    def _hang(self, here: str) -> None:
        if self.where == here:
            self.hangs.set()
            self.gate.wait(60)


class Late(Recorder):
    """Tells a line when it finishes, before or after it has waited for `gate`."""

    def __init__(self, tells_first: bool) -> None:
        super().__init__()
        self.tells_first = tells_first
        self.hangs, self.has_finished = threading.Event(), threading.Event()

    def finish(self, state: State) -> None:
        assert self.facts is not None
        super().finish(state)
        for tells in (self.tells_first, not self.tells_first):
            if tells:
                self.facts.tell("not everything was sent")
            else:
                self.hangs.set()
                self.gate.wait(60)
        self.has_finished.set()


class House:
    """A manager with trackers, and what it has told; `lines` are those of the trackers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: list[events.Event] = []
        self.lines: list[str] = []
        self.trackers: list[Recorder] = []
        self.manager: TrackerManager

    def open(self, *trackers: Recorder, timeout_s: float = 30.0, **options: Any) -> TrackerManager:
        """A manager that holds these trackers, which are named as their classes."""
        self.trackers += trackers
        wanted = [self._wanted(tracker, timeout_s) for tracker in trackers]
        self.manager = TrackerManager(wanted, self.told.append, self.folder / "lent", **options)
        return self.manager

    def _wanted(self, tracker: Recorder, timeout_s: float) -> TrackerDefinition:
        def make() -> Tracker:
            return tracker

        timeout_s = timeout_s if tracker.timeout_s is None else tracker.timeout_s
        known = facts(self.folder, tell=self.lines.append)
        return TrackerDefinition(type(tracker).__name__.lower(), make, known, timeout_s, declined=())

    def close(self) -> None:
        """Let go of those that hang, so that no thread is left."""
        for tracker in self.trackers:
            tracker.gate.set()
        self.manager.end("finished")
        self.manager.wait()

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.told if isinstance(event, events.Note) and event.level == "warning"]

    @property
    def failures(self) -> list[events.TrackerFailed]:
        return [event for event in self.told if isinstance(event, events.TrackerFailed)]
