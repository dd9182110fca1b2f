"""Finds the rank that the others wait for, from the stacks of all ranks, which are requested if the group may hang."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddptrain.driver.fault import Fault, FaultKind, format_ranks, returned_early
from ddptrain.driver.ranks import Rank, Signs
from ddptrain.driver.watchdog import Hang, Watchdog, silent_s
from ddptrain.protocol.events import FRAME, ctx_method, users_frame, waits_in
from ddptrain.protocol.rank_spec import STACKS_FOLDER

ANSWERS_S = 5.0  # time for every worker to report the stacks of its ranks
_AGAIN = 0.5  # of the limit: the time between an inquiry that found the ranks working and the next one


class Inquiry:
    """A request for the stacks of all ranks. A run has one inquiry after another; the answers are in `Rank.stacks`.

    until: its deadline (monotonic seconds), infinite before it has begun. closed: it has found a fault. limit_s: that
    of the suspected hang; None if a rank has ended its wait by itself. not_before: when the next one may begin.
    """

    def __init__(self) -> None:
        self.until = math.inf
        self.closed = False
        self.limit_s: float | None = None
        self.not_before = 0.0

    @property
    def begun(self) -> bool:
        """Whether the ranks have been asked."""
        return self.until < math.inf

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
        for rank in ranks:
            rank.stacks = None
            uses, works = watchdog.uses(rank.activity, now), watchdog.works(rank, now)
            rank.signs = Signs(watchdog.idle_s(rank, now), silent_s(rank, now), uses, works, rank.finished)

    def conclude(self, ranks: Sequence[Rank], now: float, time_ns: int) -> Fault | None:
        """Return the fault when every rank has answered or the time is over; None before and after.

        If the rank that other ranks wait for is working, there is no fault, and another inquiry may begin later.
        `time_ns` becomes the time of the fault.
        """
        if not self.under_way:
            return None
        if now < self.until and any(not rank.over and rank.stacks is None for rank in ranks):
            return None
        # If a rank has finished since the start of the inquiry, other ranks may not wait any more.
        has_moved_on = any(rank.finished and not rank.signs.finished for rank in ranks)
        if not has_moved_on or any(rank.timed_out for rank in ranks):
            fault = diagnose(ranks, self.limit_s, time_ns)
            if fault is not None:
                self.closed = True
                return fault
        self.not_before = now + _AGAIN * (self.limit_s or 0.0)
        self.until = math.inf
        for rank in ranks:
            rank.stacks_before = rank.stacks
        return None


# --- the diagnosis ---


# What a process that exits waits for, by the frame of Python that joins them; atexit functions have neither frame.
_EXIT_WAITS = {
    "threading.py _shutdown": "a non-daemon thread that it has started",
    "util.py _exit_function": "a process that it has started with multiprocessing",
}
_LOADER = "dataloader.py _get_data"  # torch's, in a rank that waits for a worker process
_STATES = {
    "stopped": "its process is stopped (SIGSTOP)",
    "uninterruptible": "its process waits in the kernel, for example for a file system that hangs",
}
_WAITING_METHODS = ("ctx.mean", "ctx.all_finite", "ctx.resume")


def diagnose(ranks: Sequence[Rank], limit_s: float | None, time_ns: int) -> Fault | None:
    """Return the fault of the rank that is missing from the collective operation; None if that rank is working.

    `limit_s`: the group was silent for this time; None if a rank has ended its wait by itself. CPU or GPU use during a
    collective operation may be a busy wait: it counts as work only in the first inquiry, or if another operation has
    begun since.
    """
    left = [rank for rank in ranks if not _is_over(rank)]
    alive = [rank for rank in left if not rank.finished]
    returned = [rank for rank in ranks if rank.finished]
    if returned and alive and all(_operation(rank) for rank in alive):
        return returned_early(returned[0].spec.rank, [rank.spec.rank for rank in alive], time_ns)
    first = _first(alive or left or ranks)
    if limit_s is not None and first.signs.works and not _still_waits(first):
        return None
    others = [rank for rank in alive if rank is not first]
    message = ", ".join(part for part in (_since(first, limit_s), _place(first)) if part) + _waiting_text(others)
    if first.stacks is not None and first.stacks.handles:
        message += f"; it is in an except or finally block after {first.stacks.handles}"
    trace = ""
    if (thread := first.thread_failure) is not None:
        message += f"; its thread {thread.thread} has ended with {thread.error}"
        trace = thread.traceback
    text = f"{message} (stacks: artifacts/{STACKS_FOLDER}/)"
    return Fault(first.spec.rank, FaultKind.HANG, time_ns, text, traceback=trace)


def _is_over(rank: Rank) -> bool:
    """Whether no other rank waits for this one. A rank that has ended its wait by itself may be the missing one."""
    return rank.over and not rank.timed_out


def _operation(rank: Rank) -> str:
    """Return the collective operation that the rank waits in; "" if it waits in none."""
    if rank.timed_out:
        return "a collective operation"
    if rank.stacks is None:
        return ""
    method = ctx_method(rank.stacks.main)  # in the others a rank may also wait for a disk
    return method if method in _WAITING_METHODS else waits_in(rank.stacks.main) or rank.stacks.pending


def _place(rank: Rank) -> str:
    """Return where the rank is, as text; "" if that is not known."""
    stacks = rank.stacks
    if stacks is None:
        return "its place in the code is not known" if not _is_over(rank) else ""
    if stacks.state in _STATES:
        return _STATES[stacks.state]
    if rank.finished and (exits := _exit_wait(stacks.main)):
        return f"it waits for {exits} to end"
    where = users_frame(stacks.main)
    if where and _LOADER in _functions(stacks.main):
        return f"it waits for a worker of its DataLoader at {where}"
    if method := ctx_method(stacks.main):
        return f"it is in {method} at {where}, which all ranks must call"
    busy = ", in compiled code that does not let Python run" if stacks.state == "busy" else ""
    return f"it is in {where}{busy}" if where else busy.lstrip(", ")


def _exit_wait(frames: Sequence[str]) -> str:
    """What a process that has done its work waits for before it can exit; "" if that is nothing known."""
    functions = _functions(frames)
    return next((text for frame, text in _EXIT_WAITS.items() if frame in functions), "")


def _functions(frames: Sequence[str]) -> set[str]:
    """Return the functions of the frames, each after the name of its file."""
    matches = [match for frame in frames if (match := FRAME.fullmatch(frame)) is not None]
    return {f"{match['file'].rpartition('/')[2]} {match['function']}" for match in matches}


def _still_waits(rank: Rank) -> bool:
    """Return whether a rank is stopped, or still in the same collective operation as in the previous inquiry."""
    stacks, last = rank.stacks, rank.stacks_before
    if stacks is None or stacks.state in _STATES:
        return stacks is not None
    if last is None or stacks.sequence is None or stacks.sequence != last.sequence:
        return False
    return bool(operation := _operation(rank)) and operation in (waits_in(last.main), last.pending)


def _first(ranks: Sequence[Rank]) -> Rank:
    """Return the rank that other ranks wait for.

    The strongest sign decides; with equal signs, the longest idle time.
    """
    known = [rank.stacks.sequence for rank in ranks if rank.stacks and rank.stacks.sequence is not None]
    least = min(known, default=0)
    behind = least < max(known, default=0)

    def signs(rank: Rank) -> tuple[bool, ...]:
        stacks = rank.stacks
        return (
            not (stacks is not None and stacks.state in _STATES),
            rank.started is not None,
            not (behind and stacks is not None and stacks.sequence == least and not rank.timed_out),
            bool(_operation(rank)),
            stacks is not None or rank.timed_out,
            rank.timed_out,
        )

    return min(ranks, key=lambda rank: (signs(rank), -rank.signs.idle_s))


def _since(first: Rank, limit_s: float | None) -> str:
    if limit_s is None:
        return "a collective operation timed out"
    if first.started is None:
        return f"did not start within {limit_s:g} s"
    if not first.entered:
        return f"did not reach the rendezvous within {limit_s:g} s"
    uses = f", although it uses the {first.signs.uses}" if first.signs.uses else ""
    end = ", after the end of its work" if first.finished else ""
    return f"no progress for {max(first.signs.silent_s, limit_s):.0f} s{uses}{end}"


def _waiting_text(others: Sequence[Rank]) -> str:
    waiting = [rank for rank in others if _operation(rank)]
    if not waiting:
        return ""
    verb = "waits" if len(waiting) == 1 else "wait"
    operations = {_operation(rank) for rank in waiting} - {"a collective operation"}
    operation = operations.pop() if len(operations) == 1 else "a collective operation"
    return f" while rank {format_ranks([rank.spec.rank for rank in waiting])} {verb} for it in {operation}"
