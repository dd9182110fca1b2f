"""Asks all ranks where they are, once one of them may hang or has waited in vain, and says whom they wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ddptrain.driver.failure import fault as failure_fault
from ddptrain.driver.failure.fault import Fault
from ddptrain.driver.failure.hang_diagnosis import Report, judge
from ddptrain.driver.failure.missing_calls import uncalled
from ddptrain.driver.failure.watchdog import Hang, Watchdog
from ddptrain.driver.rank_state import RankWatch
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import STACKS_FOLDER, RankSpec

_ANSWERS_S = 5.0  # for every rank to answer, or its worker in its place
_STACKS = "stacks"  # an order of rank/orders.py
_AGAIN = 0.5  # of the limit, from an inquiry that found the ranks at work to the next one


class Inquiry:
    """Hears what ranks tell of themselves and, once begun, waits a moment for all of them to say where they are."""

    def __init__(
        self, ranks: Sequence[RankWatch], watchdog: Watchdog, tell: Callable[[Sequence[RankSpec], str], None]
    ) -> None:
        self.ranks = ranks
        self.watchdog = watchdog
        self._tell = tell
        self._until: float | None = None
        self._closed = False
        self._limit_s: float | None = None
        self._signs: dict[int, tuple[float, bool, str]] = {}  # rank -> idle_s, works, checked
        self._before: dict[int, events.Stacks] = {}
        self._not_before = 0.0
        self._is_wait = False
        self._waited: dict[int, events.Stacks] = {}  # of the last inquiry that was begun for a wait
        self._stacks: dict[int, events.Stacks] = {}
        self._files: set[int] = set()
        self._threads: dict[int, events.ThreadFailure] = {}

    @property
    def begun(self) -> bool:
        """Whether the ranks have been asked."""
        return self._until is not None

    @property
    def under_way(self) -> bool:
        """Whether answers are waited for."""
        return self.begun and not self._closed

    def may_begin(self, now: float) -> bool:
        """Whether a suspicion is worth an inquiry: none has begun, and the last one was not a moment ago."""
        return not self.begun and now >= self._not_before

    def begin(self, hang: Hang | None) -> None:
        """Ask every rank that is there; None for `hang` says that a rank has given up its wait by itself."""
        now, dog = time.monotonic(), self.watchdog
        self._until = now + _ANSWERS_S
        self._limit_s = hang.limit_s if hang is not None else None
        self._signs = {
            watch.spec.rank: (dog.idle_s(watch, now), dog.works(watch, now), dog.checked(watch, now))
            for watch in self.ranks
        }
        self._tell([watch.spec for watch in self.ranks if not watch.over], _STACKS)

    def begin_for_wait(self) -> None:
        """Ask every rank that is there, because one says that it waits for others in a ctx method."""
        if not self.begun:
            self.begin(None)
            self._is_wait = True

    def heard(self, rank: int, event: events.Event) -> None:
        """An event of a rank."""
        match event:
            case events.Stacks():
                if rank not in self._stacks or not event.state:  # its own answer, late as it is, says more
                    self._stacks[rank] = event
            case events.FileSaved() if event.path.startswith(f"{STACKS_FOLDER}/"):
                self._files.add(rank)
            case events.ThreadFailure():
                self._threads.setdefault(rank, event)

    def result(self, now: float) -> Fault | None:
        """The fault, once and as soon as every rank has answered or the time for it is over; None before and after.

        Where the rank that the others wait for is at work, there is no fault, and another inquiry may begin later.
        """
        if self._until is None or self._closed:
            return None
        waiting = [watch for watch in self.ranks if not watch.over and watch.spec.rank not in self._files]
        if waiting and now < self._until:
            return None
        reports = [self._report(watch) for watch in self.ranks]
        fault = uncalled(reports, self._waited)
        timed_out = any(report.timed_out for report in reports)
        if fault is None and (not self._is_wait or timed_out):
            fault = judge(reports, self._limit_s, self._before)
        self._closed = True
        if fault is None:
            self._reset(now)
        return fault

    def _reset(self, now: float) -> None:
        self._until, self._closed = None, False
        if self._is_wait:
            self._waited = self._stacks
        else:
            self._not_before, self._before = now + _AGAIN * (self._limit_s or 0.0), self._stacks
        self._is_wait, self._stacks = False, {}
        self._files.clear()

    def explained(self, fault: Fault) -> Fault:
        """A fault, with what had befallen a thread of its rank before."""
        return failure_fault.after_thread(fault, self._threads.get(fault.rank))

    def _report(self, watch: RankWatch) -> Report:
        rank = watch.spec.rank
        idle_s, works, checked = self._signs.get(rank, (0.0, False, ""))
        return Report(
            rank,
            idle_s,
            self._stacks.get(rank),
            started=watch.started is not None,
            entered=watch.entered,
            finished=watch.finished,
            over=watch.over and not (watch.fault is not None and watch.fault.timed_out),
            timed_out=watch.fault is not None and watch.fault.timed_out,
            thread=self._threads.get(rank),
            works=works,
            ended_calls=watch.calls,
            checked=checked,
        )
