"""The driver's knowledge of each rank of an attempt, and the result of an attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddptrain.driver.failure import fault as failure_fault
from ddptrain.driver.failure.fault import Fault
from ddptrain.driver.worker_group.rank_place import RankPlace
from ddptrain.errors import DdptrainError
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.protocol.worker_notices import RankExit
from ddptrain.results.run_record import RankRecord


class RankState(NamedTuple):
    """The driver's knowledge of one rank. A named tuple is fast to replace, which each logged step does.

    preempted: the rank has saved, and has ended at the agreed step. tracker_fault: matters only if the run would
    succeed otherwise. lost: the rank will send no more messages. submitted_at: monotonic seconds, 0 before the
    rank is submitted. step: the last step that the rank logged.
    """

    spec: RankSpec
    place: RankPlace
    started: events.Started | None = None
    entered: bool = False
    finished: bool = False
    preempted: bool = False
    fault: Fault | None = None
    tracker_fault: Fault | None = None
    ended: RankExit | None = None
    lost: bool = False
    submitted_at: float = 0.0
    step: int | None = None

    def after(self, event: events.Event) -> RankState:
        """Return the state after an event of the rank. The caller handles faults that end the attempt."""
        match event:
            case events.Metrics(step=int(step)):
                return self._replace(step=step)
            case events.Started():
                return self._replace(started=event)
            case events.Entered():
                return self._replace(entered=True)
            case events.Finished():
                return self._replace(finished=True)
            case events.Preempted():
                return self._replace(preempted=True)
            case events.TrackerFailed(strict=True) if self.tracker_fault is None:
                return self._replace(tracker_fault=failure_fault.from_tracker(self.spec.rank, event))
        return self

    @property
    def worker(self) -> str:
        """The Dask address of the rank's worker."""
        return self.place.slot.worker

    @property
    def over(self) -> bool:
        """Whether the rank's process has ended or is lost."""
        return self.ended is not None or self.lost

    @property
    def well(self) -> bool:
        """Whether the rank has finished its work, or was preempted as requested."""
        return self.finished or self.preempted

    def record(self) -> RankRecord:
        """Return the rank's entry in run.json."""
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
class AttemptEnd:
    """The result of an attempt: a fault, a signal to the driver, a preemption, a loss of the results, or success.

    notice: why the ranks had to save and end. loss: why the run directory cannot be written any more. leaving:
    a worker is about to end. age_s: the age of the attempt's newest checkpoint at the notice, negative if it was saved
    later; None if there is none. unsaved: checkpoints and files that were not saved because a signal ended their
    transfer.
    """

    ranks: Sequence[RankState]
    fault: Fault | None
    signum: int | None
    notice: str | None = None
    loss: DdptrainError | None = None
    leaving: bool = False
    age_s: float | None = None
    unsaved: str = ""

    @property
    def saved_itself(self) -> bool:
        """Whether ranks ended with exit code 75, which says that they saved their state themselves."""
        return all(rank.well for rank in self.ranks) and any(rank.preempted for rank in self.ranks)

    @property
    def finished(self) -> bool:
        """Whether every rank has reached the end of the workload."""
        return all(rank.finished for rank in self.ranks)
