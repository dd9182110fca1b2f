"""Collects the stacks of all ranks if the group may hang, and finds the missing rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddptrain.driver.failure import fault as failure_fault
from ddptrain.driver.failure.fault import Fault, FaultKind, format_ranks, returned_early
from ddptrain.driver.failure.watchdog import Activity, Hang, Watchdog, is_stacks_file, silent_s
from ddptrain.driver.ranks import Rank
from ddptrain.protocol import events
from ddptrain.protocol.events import FRAME, ctx_method, users_frame, waits_in
from ddptrain.protocol.rank_spec import STACKS_FOLDER

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


# --- the rank that a worker group waits for, from the stacks of all ranks, not from the first reported error ---


# What a process that exits waits for, by the frame of Python that joins them; atexit functions have neither frame.
_EXIT_WAITS = {
    "threading.py _shutdown": "a non-daemon thread that it has started",
    "util.py _exit_function": "a process that it has started with multiprocessing",
}
_STATES = {
    "stopped": "its process is stopped (SIGSTOP)",
    "uninterruptible": "its process waits in the kernel, for example for a file system that hangs",
}


_WAITING_METHODS = ("ctx.mean", "ctx.all_finite", "ctx.resume")


@dataclass(frozen=True, slots=True)
class RankReport:
    """The driver's knowledge of one rank of a worker group that makes no progress.

    stacks: None if neither the rank nor its worker has answered. timed_out: the rank has ended its wait by itself.
    works: its CPU or GPU use still counts as progress. silent_s: since its last event or line. uses: "CPU" or "GPU" if
    it was in use lately.
    """

    rank: int
    idle_s: float
    stacks: events.Stacks | None = None
    started: bool = True
    entered: bool = True
    finished: bool = False
    over: bool = False
    timed_out: bool = False
    thread: events.ThreadFailure | None = None
    works: bool = False
    silent_s: float = 0.0
    uses: str = ""

    @property
    def operation(self) -> str:
        """The collective operation that the rank waits in; "" if it waits in none."""
        if self.timed_out:
            return "a collective operation"
        if self.stacks is None:
            return ""
        method = ctx_method(self.stacks.main)  # in the others a rank may also wait for a disk
        return method if method in _WAITING_METHODS else waits_in(self.stacks.main) or self.stacks.pending

    @property
    def place(self) -> str:
        """Where the rank is, as text; "" if that is not known."""
        if self.stacks is None:
            return "its place in the code is not known" if not self.over else ""
        if self.stacks.state in _STATES:
            return _STATES[self.stacks.state]
        if self.finished and (exits := _exit_wait(self.stacks.main)):
            return f"it waits for {exits} to end"
        where = users_frame(self.stacks.main)
        if method := ctx_method(self.stacks.main):
            return f"it is in {method} at {where}, which all ranks must call"
        busy = ", in compiled code that does not let Python run" if self.stacks.state == "busy" else ""
        return f"it is in {where}{busy}" if where else busy.lstrip(", ")


def _exit_wait(frames: Sequence[str]) -> str:
    """What a process that has done its work waits for before it can exit; "" if that is nothing known."""
    matches = [match for frame in frames if (match := FRAME.fullmatch(frame)) is not None]
    names = {f"{match['file'].rpartition('/')[2]} {match['function']}" for match in matches}
    return next((text for frame, text in _EXIT_WAITS.items() if frame in names), "")


def judge(
    reports: Sequence[RankReport], limit_s: float | None, before: Mapping[int, events.Stacks], time_ns: int
) -> Fault | None:
    """Return the fault of a worker group that may hang; None if the rank that other ranks wait for is working.

    `before` are the stacks of the previous inquiry, which found the rank working. CPU or GPU use during a collective
    operation may be a busy wait: it counts as work only in the first inquiry, or if another operation has begun since.
    """
    fault = find_missing_rank(reports, limit_s, time_ns)
    missing = next(report for report in reports if report.rank == fault.rank)
    if limit_s is None or fault.kind is not FaultKind.HANG or not missing.works or _still_waits(missing, before):
        return fault
    return None


def _still_waits(report: RankReport, before: Mapping[int, events.Stacks]) -> bool:
    """Return whether a rank is stopped, or still in the same collective operation as in the previous inquiry."""
    stacks, last = report.stacks, before.get(report.rank)
    if stacks is None or stacks.state in _STATES:
        return stacks is not None
    same = last is not None and stacks.sequence is not None and stacks.sequence == last.sequence
    return (
        bool(report.operation) and same and last is not None and report.operation in (waits_in(last.main), last.pending)
    )


def find_missing_rank(reports: Sequence[RankReport], limit_s: float | None, time_ns: int) -> Fault:
    """Return the fault of the rank that is missing from the collective operation of a worker group.

    `limit_s`: the group was silent for this time; None if a rank has ended its wait by itself.
    """
    alive = [report for report in reports if not report.over and not report.finished]
    gone = [report for report in reports if report.finished]
    if gone and all(report.operation for report in alive) and alive:
        return returned_early(gone[0].rank, [report.rank for report in alive], time_ns)
    first = _first(alive or [report for report in reports if not report.over] or list(reports))
    others = [report for report in alive if report is not first]
    message = ", ".join(part for part in (_since(first, limit_s), first.place) if part)
    message += _waiting_text(others) + _exception_text(first) + _thread_text(first)
    trace = first.thread.traceback if first.thread is not None else ""
    text = f"{message} (stacks: artifacts/{STACKS_FOLDER}/)"
    return Fault(first.rank, FaultKind.HANG, time_ns, text, traceback=trace)


def _first(alive: list[RankReport]) -> RankReport:
    """Return the rank that other ranks wait for.

    The strongest sign decides; with equal signs, the longest idle time.
    """
    known = [report.stacks.sequence for report in alive if report.stacks and report.stacks.sequence is not None]
    least = min(known, default=0)
    behind = least < max(known, default=0)

    def signs(report: RankReport) -> tuple[bool, ...]:
        stacks = report.stacks
        return (
            not (stacks is not None and stacks.state in _STATES),
            report.started,
            not (behind and stacks is not None and stacks.sequence == least and not report.timed_out),
            bool(report.operation),
            stacks is not None or report.timed_out,
            report.timed_out,
        )

    return min(alive, key=lambda report: (signs(report), -report.idle_s))


def _since(first: RankReport, limit_s: float | None) -> str:
    if limit_s is None:
        return "a collective operation timed out"
    if not first.started:
        return f"did not start within {limit_s:g} s"
    if not first.entered:
        return f"did not reach the rendezvous within {limit_s:g} s"
    uses = f", although it uses the {first.uses}" if first.uses else ""
    end = ", after the end of its work" if first.finished else ""
    return f"no progress for {max(first.silent_s, limit_s):.0f} s{uses}{end}"


def _waiting_text(others: Sequence[RankReport]) -> str:
    waiting = [report for report in others if report.operation]
    if not waiting:
        return ""
    verb = "waits" if len(waiting) == 1 else "wait"
    operations = {report.operation for report in waiting} - {"a collective operation"}
    operation = operations.pop() if len(operations) == 1 else "a collective operation"
    return f" while rank {format_ranks([report.rank for report in waiting])} {verb} for it in {operation}"


def _exception_text(first: RankReport) -> str:
    handles = first.stacks.handles if first.stacks is not None else ""
    return f"; it is in an except or finally block after {handles}" if handles else ""


def _thread_text(first: RankReport) -> str:
    if first.thread is None:
        return ""
    return f"; its thread {first.thread.thread} has ended with {first.thread.error}"
