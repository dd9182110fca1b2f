"""What the driver knows of each rank of an attempt, and how an attempt has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddptrain.driver.failure import fault as failure_fault
from ddptrain.driver.failure.fault import Fault
from ddptrain.driver.transfer.log_mirror import SpoolMirror
from ddptrain.driver.worker_group import Place
from ddptrain.errors import DdptrainError
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankExit, RankSpec
from ddptrain.results.record import RankRecord


@dataclass
class RankWatch:
    """What the driver knows of one rank."""

    spec: RankSpec
    place: Place
    mirror: SpoolMirror
    started: events.Started | None = None
    entered: bool = False
    finished: bool = False
    preempted: bool = False  # it has saved, and ended where all ranks had agreed to
    fault: Fault | None = None
    tracker_fault: Fault | None = None  # which counts where the run would have succeeded
    ended: RankExit | None = None
    given_up: bool = False
    submitted_at: float = 0.0  # monotonic seconds, as the next; 0 before
    heard_at: float = 0.0
    log_size: int = 0  # bytes, as its worker tells
    step: int | None = None  # the last that it has logged
    calls: Mapping[str, float] | None = None  # of ctx methods that all ranks must call, told at its end

    def heard(self, event: events.Event) -> None:
        """Note what the rank has told of itself; of faults the attempt sees to more."""
        match event:
            case events.Started():
                self.started = event
            case events.Entered():
                self.entered = True
            case events.Finished(calls=calls):
                self.finished, self.calls = True, calls
            case events.Preempted():
                self.preempted = True
            case events.Metrics(step=int(step)):
                self.step = step
            case events.TrackerFailed(strict=True) if self.tracker_fault is None:
                self.tracker_fault = failure_fault.from_tracker(self.spec.rank, event)

    @property
    def over(self) -> bool:
        """Nothing more will come of this rank."""
        return self.ended is not None or self.given_up

    @property
    def well(self) -> bool:
        """It has done what it was asked to."""
        return self.finished or self.preempted

    def record(self) -> RankRecord:
        """The rank's lines in run.json."""
        return RankRecord(
            rank=self.spec.rank,
            local_rank=self.spec.placement.local_rank,
            node_rank=self.spec.placement.node_rank,
            host=self.started.host if self.started else self.place.hostname,
            pid=self.started.pid if self.started else (self.ended.pid if self.ended else None),
            gpu=self.started.device if self.started and self.started.device != "cpu" else None,
            exit=self.ended.status if self.ended else None,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended: by a fault, by a signal to the driver, by a notice that a host goes, or well (none).

    `notice` says in words who was told to go, where the ranks were asked to save and end; `loss` is why the ranks
    were stopped, where the run directory can't be kept; `leaving` says that a worker is about to end.
    """

    ranks: Sequence[RankWatch]
    fault: Fault | None
    signum: int | None
    notice: str | None = None
    loss: DdptrainError | None = None
    leaving: bool = False

    @property
    def saved_itself(self) -> bool:
        """Whether ranks have ended with exit code 75, which says that they have seen to their state themselves."""
        return all(watch.well for watch in self.ranks) and any(watch.preempted for watch in self.ranks)

    @property
    def finished(self) -> bool:
        """Whether every rank has come to the end of the workload."""
        return all(watch.finished for watch in self.ranks)
