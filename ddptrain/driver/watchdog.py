"""Decides from the activity of all ranks whether the worker group may hang.

Activity is events, printed lines, CPU time and GPU use. A rank that has reported progress is expected to do so again:
after `timeout_s` without an event or a line, the driver requests the stacks of all ranks. As long as the rank uses the
CPU or the GPU outside of a collective operation it may continue, up to BUSY_LIMIT times `timeout_s`. A rank that has
never reported may work silently without a limit: a script that only prints its result must not be killed.

With `hang_timeout_s: auto` the limit is FIRST_S until a rank has reported ENOUGH_REPORTS times, also before its first
report. From then on it is PAUSES times the longest pause between two reports of the rank, at least SHORTEST_S, at most
LONGEST_S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddptrain.driver.ranks import CUT_S, Activity, Rank
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import STACKS_FOLDER

FIRST_S = 120.0
SHORTEST_S = 40.0
LONGEST_S = 600.0
PAUSES = 10
ENOUGH_REPORTS = 20
BUSY_LIMIT = 6  # times the highest limit: how long a rank that reports may use CPU or GPU without an event or a line
_LONGEST_EXCUSE_S = 3_600.0
_CPU_SHARE = 0.01  # of timeout_s: CPU time that counts as activity
_QUIET = 1 / 3  # of the limit: from then on, the live display shows for how long a rank has not reported


def is_stacks_file(event: events.Event) -> bool:
    """Return whether an event is a rank's file of stacks, which the driver has requested."""
    return isinstance(event, events.FileSaved) and event.path.startswith(f"{STACKS_FOLDER}/")


@dataclass(frozen=True, slots=True)
class Hang:
    """A suspected hang of a worker group: `ranks` were silent for `limit_s`, the rank that is idle longest first.

    silent_s: the longest time without an event or a line of one of these ranks.
    """

    ranks: tuple[int, ...]
    limit_s: float
    silent_s: float


@dataclass(frozen=True, slots=True)
class Watchdog:
    """The limits; `timeout_s` None turns the watchdog off. Ranks must enter the workload within `start_s`.

    adapts: the limit follows the pauses of the run once a rank has reported often enough.
    """

    timeout_s: float | None
    start_timeout_s: float
    adapts: bool = False

    @property
    def start_s(self) -> float:
        """How long ranks may take to enter the workload: the longer one of the two limits."""
        return max(self.start_timeout_s, self.timeout_s or 0.0)

    def limit_s(self, activity: Activity) -> float | None:
        """After how many seconds without a sign a rank may hang; None: never."""
        if self.timeout_s is None or not self.adapts or activity.report_count < ENOUGH_REPORTS:
            return self.timeout_s
        return min(LONGEST_S, max(SHORTEST_S, PAUSES * activity.longest_pause_s))

    def on_event(self, activity: Activity, event: events.Event, now: float, count: int = 1) -> None:
        """Note an event of a rank; `count` reports of the rank arrived at once."""
        if not event.is_progress or is_stacks_file(event) or self.timeout_s is None:
            return
        if isinstance(event, events.Entered):
            activity.entered_at = now
        elif isinstance(event, events.Finishing):
            activity.excused_until = now + min(event.timeout_s, _LONGEST_EXCUSE_S)
        activity.spoke(now)
        if isinstance(event, events.Metrics | events.Progress):
            if activity.reports is None:
                activity.reports = now - activity.entered_at <= self.timeout_s
            activity.report_count += count

    def on_cpu(self, activity: Activity, seconds: float, now: float) -> None:
        """Note that a rank has used `seconds` of CPU time with its children since its start."""
        used_s = min(activity.cpu_s, seconds)  # less than before if a child has ended: its time no longer counts
        limit_s = self.limit_s(activity)
        if limit_s is not None and seconds - used_s >= _CPU_SHARE * limit_s:
            used_s, activity.cpu_at = seconds, now
        activity.newest_cpu_s, activity.cpu_s = seconds, used_s

    def idle_s(self, rank: Rank, now: float) -> float:
        """For how long a rank has shown no activity of any kind since it was submitted."""
        return min(silent_s(rank, now), now - max(rank.activity.cpu_at, rank.activity.gpu_at))

    def uses(self, activity: Activity, now: float) -> str:
        """Return "GPU" or "CPU" if the rank has used it lately, that is within half of its limit; else ""."""
        last = {"GPU": activity.gpu_at, "CPU": activity.cpu_at}
        return next((name for name, at in last.items() if at and now - at <= (self.limit_s(activity) or 0.0) / 2), "")

    def works(self, rank: Rank, now: float) -> bool:
        """Return whether the CPU or GPU use of a rank still counts as progress."""
        activity = rank.activity
        limit_s = self.limit_s(activity)
        if self.timeout_s is None or limit_s is None:
            return True
        quiet_s, unused_s = silent_s(rank, now), now - max(activity.cpu_at, activity.gpu_at)
        # A notice about the CPU arrives up to some seconds later: it may be about the time before the silence.
        in_use = unused_s <= limit_s and quiet_s - unused_s >= min(CUT_S, limit_s / 4)
        within = quiet_s <= BUSY_LIMIT * (LONGEST_S if self.adapts else self.timeout_s)
        return (quiet_s <= limit_s or in_use) and (within or not activity.reports)

    def silence(self, ranks: Sequence[Rank], now: float) -> str:
        """Return for how long a rank has not reported, as text for the live display; "" if it is not worth a word."""
        known = [rank for rank in ranks if rank.activity.reports and not rank.well]
        if not known:
            return ""
        quiet_s = max(silent_s(rank, now) for rank in known)
        limit_s = self._group_limit_s(known)
        return f"no report for {quiet_s:.0f} s (limit {limit_s:.0f} s)" if quiet_s > _QUIET * limit_s else ""

    def overdue(self, ranks: Sequence[Rank], now: float) -> Hang | None:
        """Return the hang that the worker group may be in; None while the worker of a rank is cut off."""
        if self.timeout_s is None:
            return None
        alive = [rank for rank in ranks if rank.submitted_at and not rank.over]
        if not alive or any(0 < rank.activity.notice_at < now - CUT_S for rank in alive):
            return None
        has_begun, has_ended = all(rank.entered for rank in alive), all(rank.finished for rank in alive)
        limit_s = self.timeout_s if has_ended else self._group_limit_s(alive) if has_begun else self.start_s
        late = [rank for rank in alive if self._is_late(rank, now, limit_s)]
        if has_begun and not has_ended and any(now - rank.activity.spoke_at <= limit_s for rank in alive):
            # A rank that never reports often waits for one that reports, for example during an evaluation on rank 0.
            late = [rank for rank in late if rank.activity.reports]
        if not late:
            return None
        late.sort(key=lambda rank: -self.idle_s(rank, now))
        return Hang(tuple(rank.spec.rank for rank in late), limit_s, max(silent_s(rank, now) for rank in late))

    def _group_limit_s(self, ranks: Sequence[Rank]) -> float:
        """Return the limit of a worker group: the longest limit of the ranks that report."""
        known = [self.limit_s(rank.activity) or 0.0 for rank in ranks if rank.activity.reports]
        return max(known, default=self.timeout_s or 0.0)

    def _is_late(self, rank: Rank, now: float, limit_s: float) -> bool:
        silent = silent_s(rank, now) > limit_s
        return silent and (bool(rank.activity.reports) or self.idle_s(rank, now) > limit_s)


def new_watchdog(hang_timeout_s: float | str | None, start_timeout_s: float) -> Watchdog:
    """Return the watchdog of a configuration: a limit in seconds, "auto", or None for none."""
    if isinstance(hang_timeout_s, str):
        return Watchdog(FIRST_S, start_timeout_s, adapts=True)
    return Watchdog(hang_timeout_s, start_timeout_s)


def silent_s(rank: Rank, now: float) -> float:
    """For how long a rank has sent no event and no line."""
    return now - max(rank.submitted_at, rank.activity.spoke_at, rank.activity.excused_until)
