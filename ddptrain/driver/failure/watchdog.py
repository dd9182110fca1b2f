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
from enum import StrEnum
from typing import NamedTuple

from ddptrain.driver.ranks import Rank
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
_CUT_S = 5.0  # a worker sends a notice every 2 s; without one for this time, the rank's activity is unknown
_GPU_PERCENT = 5  # GPU use that counts as activity
_QUIET = 1 / 3  # of the limit: from then on, the live display shows for how long a rank has not reported


def alive_s(hang_timeout_s: float | str | None, lost_after_s: float) -> float:
    """Return the seconds between two notices about a silent rank: short enough for both limits."""
    limit_s = hang_timeout_s if isinstance(hang_timeout_s, float) else lost_after_s
    return min(2.0, lost_after_s / 4, limit_s / 4)


def is_stacks_file(event: events.Event) -> bool:
    """Return whether an event is a rank's file of stacks, which the driver has requested."""
    return isinstance(event, events.FileSaved) and event.path.startswith(f"{STACKS_FOLDER}/")


class Stage(StrEnum):
    """How far a worker group was when it stopped."""

    START = "start"  # at least one rank has not entered the workload
    TRAIN = "train"
    END = "end"  # all ranks that are left have done their work


@dataclass(frozen=True, slots=True)
class Hang:
    """A suspected hang of a worker group: `ranks` were silent for `limit_s`, the rank that is idle longest first.

    silent_s: the longest time without an event or a line of one of these ranks.
    """

    stage: Stage
    ranks: tuple[int, ...]
    limit_s: float
    silent_s: float


class Activity(NamedTuple):
    """The activity of one rank. A named tuple is fast to replace. Times are monotonic seconds, 0: never.

    spoke_at: of the last event or line. cpu_at, gpu_at: of the last use of the CPU, the GPU. excused_until: the rank
    has announced that it will be quiet. notice_at: of the last notice of its worker. cpu_s: CPU time at the last
    activity. newest_cpu_s: the newest CPU time. reports: whether the rank reports progress more often than required;
    None before its first report. log_size: bytes. report_count: reports so far. longest_pause_s: the longest time
    without an event or a line since the first report.
    """

    spoke_at: float = 0.0
    cpu_at: float = 0.0
    gpu_at: float = 0.0
    entered_at: float = 0.0
    excused_until: float = 0.0
    notice_at: float = 0.0
    cpu_s: float = 0.0
    newest_cpu_s: float = 0.0
    reports: bool | None = None
    log_size: int = 0
    report_count: int = 0
    longest_pause_s: float = 0.0

    def noticed(self, now: float) -> Activity:
        """Return the activity after a notice of the rank's worker.

        Time in which the worker was cut off is not counted.
        """
        cut_s = now - self.notice_at
        rested = self.shifted(cut_s, now) if self.notice_at and cut_s > _CUT_S else self
        return rested._replace(notice_at=now)

    def spoke(self, now: float) -> Activity:
        """Return the activity after an event or a printed line of the rank."""
        pause_s = now - self.spoke_at if self.report_count else 0.0
        longest_s = max(self.longest_pause_s, pause_s)
        return self._replace(spoke_at=now, cpu_s=self.newest_cpu_s, longest_pause_s=longest_s)

    def grew(self, log_size: int, now: float) -> Activity:
        """Return the activity for a log of `log_size` bytes; if it has grown, the rank has printed a line."""
        if log_size <= self.log_size:
            return self
        return self.spoke(now)._replace(log_size=log_size)

    def used_gpu(self, percent: float, now: float) -> Activity:
        """Return the activity for a GPU use in percent, as NVML reports it."""
        return self._replace(gpu_at=now) if percent >= _GPU_PERCENT else self

    def shifted(self, seconds: float, now: float) -> Activity:
        """Return the activity as if these seconds had not passed."""

        def later(at: float) -> float:
            return min(now, at + seconds) if at else at

        return self._replace(
            spoke_at=later(self.spoke_at),
            cpu_at=later(self.cpu_at),
            gpu_at=later(self.gpu_at),
            entered_at=later(self.entered_at),
            notice_at=later(self.notice_at),
            excused_until=self.excused_until + seconds if self.excused_until else 0.0,
        )


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

    def after_event(self, activity: Activity, event: events.Event, now: float, count: int = 1) -> Activity:
        """Return the activity of a rank after an event that it sent; `count` reports of the rank arrived at once."""
        if not event.is_progress or is_stacks_file(event) or self.timeout_s is None:
            return activity
        if isinstance(event, events.Entered):
            activity = activity._replace(entered_at=now)
        elif isinstance(event, events.Finishing):
            activity = activity._replace(excused_until=now + min(event.timeout_s, _LONGEST_EXCUSE_S))
        if not isinstance(event, events.Metrics | events.Progress):
            return activity.spoke(now)
        if activity.reports is None:
            activity = activity._replace(reports=now - activity.entered_at <= self.timeout_s)
        return activity.spoke(now)._replace(report_count=activity.report_count + count)

    def after_cpu(self, activity: Activity, seconds: float, now: float) -> Activity:
        """Return the activity of a rank that has used `seconds` of CPU time with its children since its start."""
        used_s = min(activity.cpu_s, seconds)  # less than before if a child has ended: its time no longer counts
        limit_s = self.limit_s(activity)
        if limit_s is not None and seconds - used_s >= _CPU_SHARE * limit_s:
            return activity._replace(newest_cpu_s=seconds, cpu_s=seconds, cpu_at=now)
        return activity._replace(newest_cpu_s=seconds, cpu_s=used_s)

    def idle_s(self, rank: Rank, activity: Activity, now: float) -> float:
        """For how long a rank has shown no activity of any kind since it was submitted."""
        return min(silent_s(rank, activity, now), now - max(activity.cpu_at, activity.gpu_at))

    def uses(self, activity: Activity, now: float) -> str:
        """Return "GPU" or "CPU" if the rank has used it lately, that is within half of its limit; else ""."""
        last = {"GPU": activity.gpu_at, "CPU": activity.cpu_at}
        return next((name for name, at in last.items() if at and now - at <= (self.limit_s(activity) or 0.0) / 2), "")

    def works(self, rank: Rank, activity: Activity, now: float) -> bool:
        """Return whether the CPU or GPU use of a rank still counts as progress."""
        limit_s = self.limit_s(activity)
        if self.timeout_s is None or limit_s is None:
            return True
        quiet_s, unused_s = silent_s(rank, activity, now), now - max(activity.cpu_at, activity.gpu_at)
        # A notice about the CPU arrives up to some seconds later: it may be about the time before the silence.
        in_use = unused_s <= limit_s and quiet_s - unused_s >= min(_CUT_S, limit_s / 4)
        within = quiet_s <= BUSY_LIMIT * (LONGEST_S if self.adapts else self.timeout_s)
        return (quiet_s <= limit_s or in_use) and (within or not activity.reports)

    def silence(self, ranks: Sequence[Rank], activities: Sequence[Activity], now: float) -> str:
        """Return for how long a rank has not reported, as text for the live display; "" if it is not worth a word."""
        known = [pair for pair in zip(ranks, activities, strict=True) if pair[1].reports and not pair[0].well]
        if not known:
            return ""
        quiet_s = max(silent_s(*pair, now) for pair in known)
        limit_s = self._group_limit_s(Stage.TRAIN, [activity for _, activity in known])
        return f"no report for {quiet_s:.0f} s (limit {limit_s:.0f} s)" if quiet_s > _QUIET * limit_s else ""

    def overdue(self, ranks: Sequence[Rank], activities: Sequence[Activity], now: float) -> Hang | None:
        """Return the hang that the worker group may be in; None while the worker of a rank is cut off."""
        if self.timeout_s is None:
            return None
        alive = [pair for pair in zip(ranks, activities, strict=True) if pair[0].submitted_at and not pair[0].over]
        if not alive or any(activity.notice_at and now - activity.notice_at > _CUT_S for _, activity in alive):
            return None
        stage = _stage([rank for rank, _ in alive])
        limit_s = self._group_limit_s(stage, [activity for _, activity in alive])
        late = [pair for pair in alive if self._is_late(*pair, now, limit_s)]
        if stage == Stage.TRAIN and any(now - activity.spoke_at <= limit_s for _, activity in alive):
            # A rank that never reports often waits for one that reports, for example during an evaluation on rank 0.
            late = [pair for pair in late if pair[1].reports]
        if not late:
            return None
        idle = sorted(((self.idle_s(*pair, now), pair[0].spec.rank) for pair in late), key=lambda item: -item[0])
        return Hang(stage, tuple(rank for _, rank in idle), limit_s, max(silent_s(*pair, now) for pair in late))

    def _group_limit_s(self, stage: Stage, activities: Sequence[Activity]) -> float:
        """Return the limit of a worker group: the longest limit of the ranks that report."""
        if stage == Stage.START:
            return self.start_s
        known = [self.limit_s(activity) or 0.0 for activity in activities if activity.reports]
        return max(known) if known and stage == Stage.TRAIN else self.timeout_s or 0.0

    def _is_late(self, rank: Rank, activity: Activity, now: float, limit_s: float) -> bool:
        silent = silent_s(rank, activity, now) > limit_s
        return silent and (bool(activity.reports) or self.idle_s(rank, activity, now) > limit_s)


def new_watchdog(hang_timeout_s: float | str | None, start_timeout_s: float) -> Watchdog:
    """Return the watchdog of a configuration: a limit in seconds, "auto", or None for none."""
    if isinstance(hang_timeout_s, str):
        return Watchdog(FIRST_S, start_timeout_s, adapts=True)
    return Watchdog(hang_timeout_s, start_timeout_s)


def silent_s(rank: Rank, activity: Activity, now: float) -> float:
    """For how long a rank has sent no event and no line."""
    return now - max(rank.submitted_at, activity.spoke_at, activity.excused_until)


def _stage(alive: Sequence[Rank]) -> Stage:
    if all(rank.finished for rank in alive):
        return Stage.END
    return Stage.TRAIN if all(rank.entered for rank in alive) else Stage.START
