"""Finds the rank that the others wait for, from the stacks of all ranks, which are requested if the group may hang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddptrain.driver.failure.fault import (
    Fault,
    FaultKind,
    add_thread_failure,
    format_ranks,
    returned_early,
)
from ddptrain.driver.failure.watchdog import Hang, Watchdog, silent_s
from ddptrain.driver.ranks import Rank
from ddptrain.protocol import events
from ddptrain.protocol.events import FRAME, ctx_method, users_frame, waits_in
from ddptrain.protocol.rank_spec import STACKS_FOLDER

ANSWERS_S = 5.0  # time for every worker to report the stacks of its ranks
_AGAIN = 0.5  # of the limit: the time between an inquiry that found the ranks working and the next one


class Inquiry:
    """A request for the stacks of all ranks, and the answers. A run has one inquiry after another.

    until: its deadline (monotonic seconds), None before it has begun. closed: it has found a fault. limit_s: the limit
    of the suspected hang; None if a rank has ended its wait by itself. not_before: when the next one may begin.
    """

    def __init__(self) -> None:
        self.until: float | None = None
        self.closed = False
        self.limit_s: float | None = None
        self.not_before = 0.0
        self._signs: dict[int, RankReport] = {}  # what was known about each rank when the inquiry began
        self._stacks: dict[int, events.Stacks] = {}
        self._before: dict[int, events.Stacks] = {}  # the stacks of the last inquiry
        self._threads: dict[int, events.ThreadFailure] = {}

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

    def begin(self, hang: Hang | None, ranks: Sequence[Rank], watchdog: Watchdog, now: float) -> None:
        """Note what is known; `hang` is None if a rank has ended its wait by itself."""
        self.until, self.limit_s = now + ANSWERS_S, hang.limit_s if hang is not None else None
        self._stacks = {}
        for rank in ranks:
            self._signs[rank.spec.rank] = RankReport(
                rank.spec.rank,
                watchdog.idle_s(rank, now),
                silent_s=silent_s(rank, now),
                uses=watchdog.uses(rank.activity, now),
                finished=rank.finished,
                works=watchdog.works(rank, now),
            )

    def on_event(self, rank: int, event: events.Event) -> None:
        """Note an event of a rank."""
        if isinstance(event, events.Stacks) and self.begun:
            self._stacks[rank] = event
        elif isinstance(event, events.ThreadFailure):
            self._threads.setdefault(rank, event)

    def conclude(self, ranks: Sequence[Rank], now: float, time_ns: int) -> Fault | None:
        """Return the fault when every rank has answered or the time is over; None before and after.

        If the rank that other ranks wait for is working, there is no fault, and another inquiry may begin later.
        `time_ns` becomes the time of the fault.
        """
        if self.until is None or self.closed:
            return None
        if now < self.until and any(not rank.over and rank.spec.rank not in self._stacks for rank in ranks):
            return None
        reports = [self._report(rank) for rank in ranks]
        # If a rank has finished since the start of the inquiry, other ranks may not wait any more.
        has_moved_on = any(rank.finished and not self._signs[rank.spec.rank].finished for rank in ranks)
        if any(report.timed_out for report in reports) or not has_moved_on:
            fault = diagnose(reports, self.limit_s, self._before, time_ns)
            if fault is not None:
                self.closed = True
                return fault
        self.not_before = now + _AGAIN * (self.limit_s or 0.0)
        self.until, self._before = None, self._stacks
        return None

    def explained(self, fault: Fault) -> Fault:
        """Return the fault with the exception that ended a thread of its rank earlier, if there is one."""
        return add_thread_failure(fault, self._threads.get(fault.rank))

    def _report(self, rank: Rank) -> RankReport:
        number = rank.spec.rank
        timed_out = rank.fault is not None and rank.fault.timed_out
        return replace(
            self._signs[number],
            stacks=self._stacks.get(number),
            started=rank.started is not None,
            entered=rank.entered,
            finished=rank.finished,
            over=rank.over and not timed_out,
            timed_out=timed_out,
            thread=self._threads.get(number),
        )


# --- the diagnosis ---


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

    stacks: None if its worker has not answered. timed_out: the rank has ended its wait by itself.
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


def diagnose(
    reports: Sequence[RankReport], limit_s: float | None, before: Mapping[int, events.Stacks], time_ns: int
) -> Fault | None:
    """Return the fault of the rank that is missing from the collective operation; None if that rank is working.

    `limit_s`: the group was silent for this time; None if a rank has ended its wait by itself. `before` are the stacks
    of the previous inquiry, which found the rank working. CPU or GPU use during a collective operation may be a busy
    wait: it counts as work only in the first inquiry, or if another operation has begun since.
    """
    alive = [report for report in reports if not report.over and not report.finished]
    returned = [report for report in reports if report.finished]
    if returned and all(report.operation for report in alive) and alive:
        return returned_early(returned[0].rank, [report.rank for report in alive], time_ns)
    first = _first(alive or [report for report in reports if not report.over] or list(reports))
    if limit_s is not None and first.works and not _still_waits(first, before):
        return None
    others = [report for report in alive if report is not first]
    message = ", ".join(part for part in (_since(first, limit_s), first.place) if part) + _waiting_text(others)
    if first.stacks is not None and first.stacks.handles:
        message += f"; it is in an except or finally block after {first.stacks.handles}"
    trace = ""
    if first.thread is not None:
        message += f"; its thread {first.thread.thread} has ended with {first.thread.error}"
        trace = first.thread.traceback
    text = f"{message} (stacks: artifacts/{STACKS_FOLDER}/)"
    return Fault(first.rank, FaultKind.HANG, time_ns, text, traceback=trace)


def _still_waits(report: RankReport, before: Mapping[int, events.Stacks]) -> bool:
    """Return whether a rank is stopped, or still in the same collective operation as in the previous inquiry."""
    stacks, last = report.stacks, before.get(report.rank)
    if stacks is None or stacks.state in _STATES:
        return stacks is not None
    same = last is not None and stacks.sequence is not None and stacks.sequence == last.sequence
    return (
        bool(report.operation) and same and last is not None and report.operation in (waits_in(last.main), last.pending)
    )


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
