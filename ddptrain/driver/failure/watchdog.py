"""Records the signs of life of every rank and tells when the gang may hang.

Signs of life are events, printed lines, CPU time and GPU use. A rank that has reported progress is expected to do so
again: without an event or a line for `timeout_s` all ranks are asked for their stacks, and as long as it uses the CPU
or the GPU outside of a collective operation it may go on, up to BUSY_LIMIT times `timeout_s`. A rank that has never
reported may work in silence without a limit: a script that only prints its result must not be killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import STACKS_FOLDER, RankSpec

BUSY_LIMIT = 6  # times timeout_s: how long a rank that reports may use CPU or GPU without an event or a line
_LONGEST_EXCUSE_S = 3_600.0
_CPU_SHARE = 0.01  # of timeout_s: CPU time that counts as a sign of life
_CUT_S = 5.0  # without a word from a rank's worker, which speaks every 2 s: what the rank does is not known
_GPU_PERCENT = 5  # GPU use that counts as a sign of life
_SAYS_NOTHING = (
    events.Started,
    events.Stacks,
    events.Waiting,
    events.Noticed,
    events.ThreadFailure,
    events.Tracked,
    events.TrackerFailed,
)  # they come of themselves


def alive_s(hang_timeout_s: float | None, lost_after_s: float) -> float:
    """Seconds from one word of a quiet rank's worker to the next: often enough for both limits."""
    return min(2.0, lost_after_s / 4, (hang_timeout_s or lost_after_s) / 4)


class Stage(StrEnum):
    """How far a gang was when it stopped."""

    START = "start"  # some rank has never entered the workload
    TRAIN = "train"
    END = "end"  # all that is left are ranks whose work is done


class Watched(Protocol):
    """What is asked of a rank."""

    spec: RankSpec
    entered: bool
    finished: bool
    submitted_at: float

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""


@dataclass(frozen=True, slots=True)
class Hang:
    """A gang that may hang: `ranks` have sent nothing for `limit_s`, the longest idle first. Their stacks decide."""

    stage: Stage
    ranks: tuple[int, ...]
    limit_s: float
    idle_s: float  # of the one that has been silent for longest


@dataclass
class _Signs:
    """What one rank has shown: clock seconds, 0 where it has not."""

    spoke_at: float = 0.0  # an event or a line
    cpu_at: float = 0.0  # has used the CPU
    gpu_at: float = 0.0  # has used the GPU
    entered_at: float = 0.0
    excused_until: float = 0.0  # has said that it will be quiet
    notice_at: float = 0.0  # its worker has sent anything
    cpu_s: float = 0.0  # at its last sign
    newest_cpu_s: float = 0.0
    has_gpu: bool = False  # its GPU use is known
    reports: bool | None = None  # more often than it has to; None before its first report

    def shift(self, seconds: float, now: float) -> None:
        """Forget that time has passed."""
        for name in ("spoke_at", "cpu_at", "gpu_at", "entered_at", "notice_at"):
            if getattr(self, name):
                setattr(self, name, min(now, getattr(self, name) + seconds))
        if self.excused_until:
            self.excused_until += seconds


class Watchdog:
    """Hears of every rank of an attempt, and is asked from time to time whether one has stopped.

    `timeout_s` None turns it off. Ranks have the longer one of the two times to enter the workload.
    """

    def __init__(
        self, timeout_s: float | None, start_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.timeout_s = timeout_s
        self.start_timeout_s = max(start_timeout_s, timeout_s or 0.0)
        self._clock = clock
        self._signs: dict[int, _Signs] = {}

    def notice(self, rank: int) -> None:
        """The worker of a rank has sent something. Time in which it was cut off does not count."""
        signs, now = self._of(rank), self._clock()
        if signs.notice_at and now - signs.notice_at > _CUT_S:
            signs.shift(now - signs.notice_at, now)
        signs.notice_at = now

    def heard(self, rank: int, event: events.Event) -> None:
        """A rank has sent an event."""
        ours = isinstance(event, events.FileSaved) and event.path.startswith(f"{STACKS_FOLDER}/")
        if ours or isinstance(event, _SAYS_NOTHING) or self.timeout_s is None:
            return
        signs, now = self._of(rank), self._clock()
        if isinstance(event, events.Entered):
            signs.entered_at = now
        elif isinstance(event, events.Finishing):
            signs.excused_until = now + min(event.timeout_s, _LONGEST_EXCUSE_S)
        elif isinstance(event, events.Metrics | events.Progress) and signs.reports is None:
            signs.reports = now - signs.entered_at <= self.timeout_s
        self._speaks(signs)

    def grew(self, rank: int) -> None:
        """A rank has printed something."""
        self._speaks(self._of(rank))

    def cpu(self, rank: int, seconds: float) -> None:
        """A rank and its children have used the processor for `seconds` since they began."""
        signs = self._of(rank)
        signs.newest_cpu_s = seconds
        if seconds < signs.cpu_s:  # a child has gone, with what it had used
            signs.cpu_s = seconds
        if self.timeout_s is not None and seconds - signs.cpu_s >= _CPU_SHARE * self.timeout_s:
            signs.cpu_s = seconds
            signs.cpu_at = self._clock()

    def gpu(self, rank: int, percent: float) -> None:
        """The GPU of a rank has been in use for that share of the last moment, as NVML tells."""
        signs = self._of(rank)
        signs.has_gpu = True
        if percent >= _GPU_PERCENT:
            signs.gpu_at = self._clock()

    def suspended(self, seconds: float) -> None:
        """We were stopped ourselves for that long, and have heard nobody."""
        for signs in self._signs.values():
            signs.shift(seconds, self._clock())

    def idle_s(self, rank: Watched, now: float) -> float:
        """For how long a rank has given no sign of life of any kind, since it was ordered."""
        signs = self._of(rank.spec.rank)
        return min(self._silent_s(rank, now), now - max(signs.cpu_at, signs.gpu_at))

    def works(self, rank: Watched, now: float) -> bool:
        """Whether the CPU or GPU use of a rank still counts as progress."""
        if self.timeout_s is None:
            return True
        within = self._silent_s(rank, now) <= BUSY_LIMIT * self.timeout_s
        return self.idle_s(rank, now) <= self.timeout_s and (within or not self._of(rank.spec.rank).reports)

    def checked(self, rank: Watched, now: float) -> str:
        """The signals that were looked at, and what they say of a rank, in words."""
        signs, since = self._of(rank.spec.rank), rank.submitted_at
        silent_s = self._silent_s(rank, now)
        cpu_s, gpu_s = now - max(since, signs.cpu_at), now - max(since, signs.gpu_at)
        gpu = f"last GPU use {gpu_s:.0f} s ago" if signs.has_gpu else "GPU use not measured"
        words = f"last event or printed line {silent_s:.0f} s ago, last CPU use {cpu_s:.0f} s ago, {gpu}"
        over = self.timeout_s is not None and silent_s > BUSY_LIMIT * self.timeout_s
        return words + (f"; CPU or GPU use alone counts for {BUSY_LIMIT} x hang_timeout_s" if over else "")

    def _silent_s(self, rank: Watched, now: float) -> float:
        """For how long a rank has sent no event and no line."""
        signs = self._of(rank.spec.rank)
        return now - max(rank.submitted_at, signs.spoke_at, signs.excused_until)

    def _is_late(self, rank: Watched, now: float, limit_s: float) -> bool:
        silent = self._silent_s(rank, now) > limit_s
        return silent and (bool(self._of(rank.spec.rank).reports) or self.idle_s(rank, now) > limit_s)

    def overdue(self, now: float, ranks: Sequence[Watched]) -> Hang | None:
        """The hang that the gang may be in by now, if any; none while the worker of a rank is cut off."""
        alive = [rank for rank in ranks if rank.submitted_at and not rank.over]
        notices = [self._of(rank.spec.rank).notice_at for rank in alive]
        if self.timeout_s is None or not alive or any(at and now - at > _CUT_S for at in notices):
            return None
        stage = _stage(alive)
        limit_s = self.start_timeout_s if stage == Stage.START else self.timeout_s
        late = [rank for rank in alive if self._is_late(rank, now, limit_s)]
        if stage == Stage.TRAIN and any(now - self._of(rank.spec.rank).spoke_at <= limit_s for rank in alive):
            # Who never reports is often waiting for the one that does: for a long evaluation on rank 0, say.
            late = [rank for rank in late if self._of(rank.spec.rank).reports]
        if not late:
            return None
        late.sort(key=lambda rank: self.idle_s(rank, now), reverse=True)
        return Hang(stage, tuple(rank.spec.rank for rank in late), limit_s, self.idle_s(late[0], now))

    def _of(self, rank: int) -> _Signs:
        return self._signs.setdefault(rank, _Signs())

    def _speaks(self, signs: _Signs) -> None:
        signs.spoke_at = self._clock()
        signs.cpu_s = signs.newest_cpu_s


def _stage(alive: Sequence[Watched]) -> Stage:
    if all(rank.finished for rank in alive):
        return Stage.END
    return Stage.TRAIN if all(rank.entered for rank in alive) else Stage.START
