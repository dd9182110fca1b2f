"""The immutable state of an attempt, on which all decisions in transition.py depend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from ddptrain.driver.attempt.actions import Action
from ddptrain.driver.attempt.rank_state import AttemptEnd, RankState
from ddptrain.driver.failure.fault import Fault
from ddptrain.driver.failure.root_cause import find_root_cause
from ddptrain.driver.failure.stack_collector import StackCollector
from ddptrain.driver.failure.watchdog import Activity, Watchdog
from ddptrain.driver.failure.worker_heartbeat import WorkerHeartbeat
from ddptrain.errors import DdptrainError
from ddptrain.protocol import events

Item = TypeVar("Item")


class Moment(NamedTuple):
    """When a message is handled: monotonic seconds, and nanoseconds of the wall clock."""

    monotonic: float
    time_ns: int


class AttemptState(NamedTuple):
    """The state of an attempt. A named tuple is fast to replace, which each message does.

    All deadlines are monotonic seconds, None: not set.

    ranks, activities: by rank. stacks: files of stacks that are stored only if the inquiry finds a fault. faults:
    without mere consequences of a signal or a notice. signals: the number of signals to the driver; signum: the last
    of them. notice: why the ranks must save and end, since noticed_at. saved_at: when the newest checkpoint of this
    attempt arrived in the run directory. loss: why the run directory cannot be
    written. settle_until: end of the wait for an earlier fault. preempt_until: when ranks must have saved. stop_until:
    when stopped ranks are given up. spare_until: when also the rank that failed is stopped. transfers: checkpoints and
    files on their way into the run directory.
    """

    ranks: tuple[RankState, ...]
    activities: tuple[Activity, ...]
    watchdog: Watchdog
    heartbeat: WorkerHeartbeat
    inquiry: StackCollector = StackCollector()
    faults: tuple[Fault, ...] = ()
    stacks: tuple[tuple[int, events.FileSaved], ...] = ()
    signals: int = 0
    signum: int | None = None
    notice: str | None = None
    noticed_at: float = 0.0
    saved_at: float | None = None
    leaving: bool = False
    loss: DdptrainError | None = None
    settle_until: float | None = None
    preempt_until: float | None = None
    stop_until: float | None = None
    spare_until: float | None = None
    transfers: int = 0
    running: int = 0  # ranks that are not over
    outside: int = 0  # ranks that have not entered the workload
    quiet: str = ""  # for how long a rank has not reported, as shown

    @property
    def over(self) -> bool:
        """Whether every rank has ended or is lost."""
        return self.running == 0

    @property
    def stopping(self) -> bool:
        """Whether the ranks are being stopped."""
        return self.stop_until is not None

    def due(self) -> float | None:
        """Return the next deadline in monotonic seconds, or None. An inquiry in progress suspends settle_until."""
        waits = self.inquiry.until if self.inquiry.under_way else self.settle_until
        deadlines = (None if self.stopping else waits, self.spare_until, self.preempt_until, self.stop_until)
        return min((until for until in deadlines if until is not None), default=None)

    @property
    def ordered(self) -> bool:
        """Whether the ranks end because of a signal or a notice."""
        return self.signum is not None or self.notice is not None

    def cause(self) -> Fault | None:
        """Return the root cause of the faults so far; None without a fault."""
        if not self.faults:
            return None
        finished = [rank.spec.rank for rank in self.ranks if rank.finished]
        return self.inquiry.explained(find_root_cause(self.faults, finished))

    def end(self, unsaved: str = "") -> AttemptEnd:
        """Return the result of the attempt. Must be called only when it is over. `unsaved`: see AttemptEnd."""
        age_s = self.noticed_at - self.saved_at if self.saved_at is not None else None
        return AttemptEnd(self.ranks, self.cause(), self.signum, self.notice, self.loss, self.leaving, age_s, unsaved)


def new_state(
    ranks: Sequence[RankState],
    watchdog: Watchdog,
    start_timeout_s: float,
    lost_after_s: float,
    now: Moment,
) -> AttemptState:
    """Return the state before the first message."""
    heartbeat = WorkerHeartbeat(start_timeout_s, lost_after_s, now.monotonic, now.monotonic)
    count = len(ranks)
    outside = sum(not rank.entered for rank in ranks)
    return AttemptState(tuple(ranks), (Activity(),) * count, watchdog, heartbeat, running=count, outside=outside)


class Draft:
    """The next state, which replaces the current one step by step, and the actions so far, in order."""

    def __init__(self, state: AttemptState, now: Moment) -> None:
        self.state = state
        self.now = now.monotonic
        self.time_ns = now.time_ns
        self.actions: list[Action] = []
        first = state.ranks[0].spec
        self.attempt, self.grace_s = first.attempt, first.supervision.grace_s

    def alive(self) -> tuple[int, ...]:
        """Return the ranks that have not ended and are not lost."""
        return tuple(rank for rank, watched in enumerate(self.state.ranks) if not watched.over)

    def do(self, action: Action) -> None:
        """Add an action."""
        self.actions.append(action)

    def change(self, **changes: Any) -> None:
        """Replace fields of the state."""
        self.state = self.state._replace(**changes)

    def change_rank(self, rank: int, **changes: Any) -> None:
        """Replace fields of a rank's state."""
        self.put_rank(rank, self.state.ranks[rank]._replace(**changes))

    def put_rank(self, rank: int, watched: RankState) -> None:
        """Replace the state of a rank."""
        ranks = self.state.ranks
        before = ranks[rank]
        ended, entered = watched.over and not before.over, watched.entered and not before.entered
        counts = {"running": self.state.running - ended, "outside": self.state.outside - entered}
        self.change(ranks=_replaced(ranks, rank, watched), **counts)

    def put_activity(self, rank: int, activity: Activity) -> None:
        """Replace the activity of a rank."""
        activities = self.state.activities
        if activity is not activities[rank]:
            self.change(activities=_replaced(activities, rank, activity))


def _replaced(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    """Return a copy with another item. A list is four times as fast as joining two slices."""
    copy = list(items)
    copy[index] = item
    return tuple(copy)
