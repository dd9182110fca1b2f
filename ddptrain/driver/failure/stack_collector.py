"""Collects the stacks of all ranks if the group may hang, and finds the missing rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddptrain.driver.failure import fault as failure_fault
from ddptrain.driver.failure.fault import Fault
from ddptrain.driver.failure.hang_diagnosis import RankReport, judge
from ddptrain.driver.failure.watchdog import Activity, Hang, Watchdog, is_stacks_file, silent_s
from ddptrain.driver.ranks import Rank
from ddptrain.protocol import events

ANSWERS_S = 5.0  # time for every rank, or its worker, to answer
_AGAIN = 0.5  # of the limit: the time between an inquiry that found the ranks working and the next one


@dataclass(frozen=True, slots=True)
class StackCollector:
    """The state of an inquiry: a request for the stacks of all ranks, and their answers.

    until: its deadline (monotonic seconds), None before it has begun. limit_s: the limit of the suspected hang; None if
    a rank has ended its wait by itself. not_before: when the next inquiry may begin. signs: what was known about each
    rank when the inquiry began. before: the stacks of the last inquiry.
    """

    until: float | None = None
    closed: bool = False
    limit_s: float | None = None
    not_before: float = 0.0
    signs: Mapping[int, RankReport] = field(default_factory=dict)
    stacks: Mapping[int, events.Stacks] = field(default_factory=dict)
    answered: frozenset[int] = frozenset()
    before: Mapping[int, events.Stacks] = field(default_factory=dict)
    threads: Mapping[int, events.ThreadFailure] = field(default_factory=dict)

    @property
    def begun(self) -> bool:
        """Whether the ranks have been asked."""
        return self.until is not None

    @property
    def under_way(self) -> bool:
        """Whether the inquiry waits for answers."""
        return self.begun and not self.closed

    def may_begin(self, now: float) -> bool:
        """Return whether an inquiry may begin: none is in progress, and the last one was not too recently."""
        return not self.begun and now >= self.not_before

    def begin(
        self,
        hang: Hang | None,
        ranks: Sequence[Rank],
        activities: Sequence[Activity],
        watchdog: Watchdog,
        now: float,
    ) -> StackCollector:
        """Return the inquiry after its start; `hang` is None if a rank has ended its wait by itself."""
        signs = {
            rank.spec.rank: RankReport(
                rank.spec.rank,
                watchdog.idle_s(rank, activity, now),
                silent_s=silent_s(rank, activity, now),
                uses=watchdog.uses(activity, now),
                finished=rank.finished,
                works=watchdog.works(rank, activity, now),
            )
            for rank, activity in zip(ranks, activities, strict=True)
        }
        limit_s = hang.limit_s if hang is not None else None
        return dataclasses.replace(self, until=now + ANSWERS_S, limit_s=limit_s, signs=signs)

    def after(self, rank: int, event: events.Event) -> StackCollector:
        """Return the inquiry after an event of a rank. A late answer of the rank replaces the answer of its worker."""
        if isinstance(event, events.Stacks) and (rank not in self.stacks or not event.state):
            return dataclasses.replace(self, stacks={**self.stacks, rank: event})
        if is_stacks_file(event):
            return dataclasses.replace(self, answered=self.answered | {rank})
        if isinstance(event, events.ThreadFailure) and rank not in self.threads:
            return dataclasses.replace(self, threads={**self.threads, rank: event})
        return self

    def result(self, ranks: Sequence[Rank], now: float, time_ns: int) -> tuple[StackCollector, Fault | None]:
        """Return the next state, and the fault when every rank has answered or the time is over; None before and after.

        If the rank that other ranks wait for is working, there is no fault, and another inquiry may begin later.
        `time_ns` becomes the time of the fault.
        """
        if self.until is None or self.closed:
            return self, None
        if now < self.until and any(not rank.over and rank.spec.rank not in self.answered for rank in ranks):
            return self, None
        reports = [self._report(rank) for rank in ranks]
        fault = None
        if any(report.timed_out for report in reports) or not self._has_moved_on(ranks):
            fault = judge(reports, self.limit_s, self.before, time_ns)
        if fault is not None:
            return dataclasses.replace(self, closed=True), fault
        return self._reset(now), None

    def _has_moved_on(self, ranks: Sequence[Rank]) -> bool:
        """Return whether a rank has finished since the start of the inquiry; other ranks may not wait any more."""
        return any(rank.finished and not self.signs[rank.spec.rank].finished for rank in ranks)

    def _reset(self, now: float) -> StackCollector:
        """Return the state before the next inquiry, with the stacks of this one."""
        not_before = now + _AGAIN * (self.limit_s or 0.0)
        return StackCollector(threads=self.threads, not_before=not_before, before=self.stacks)

    def explained(self, fault: Fault) -> Fault:
        """Return the fault with the exception that ended a thread of its rank earlier, if there is one."""
        return failure_fault.add_thread_failure(fault, self.threads.get(fault.rank))

    def _report(self, rank: Rank) -> RankReport:
        number = rank.spec.rank
        timed_out = rank.fault is not None and rank.fault.timed_out
        return dataclasses.replace(
            self.signs.get(number, RankReport(number, 0.0)),
            stacks=self.stacks.get(number),
            started=rank.started is not None,
            entered=rank.entered,
            finished=rank.finished,
            over=rank.over and not timed_out,
            timed_out=timed_out,
            thread=self.threads.get(number),
        )
