"""Finds losses without a message: silent workers, workers that never start a rank, and a lost scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddptrain.driver.attempt.rank_state import RankState
from ddptrain.driver.failure.fault import FaultKind, Loss
from ddptrain.driver.failure.watchdog import Activity

_SCHEDULER_LOST_S = 3.0  # after this time without a connection to the scheduler, the attempt ends
_SUSPENDED_S = 3.0  # after this time between two ticks, this process itself was suspended, and received no messages


@dataclass(frozen=True, slots=True)
class WorkerHeartbeat:
    """The limits in seconds, and the time of the last check (monotonic seconds).

    A worker without a notice for `lost_after_s` is lost or cut off. connected_at: when the scheduler was last
    connected.
    """

    start_timeout_s: float
    lost_after_s: float
    connected_at: float
    checked_at: float

    def checked(self, now: float, *, connected: bool) -> tuple[WorkerHeartbeat, float]:
        """Return the state after a check, and for how many seconds this process was suspended (0.0: it was not)."""
        slept_s = now - self.checked_at
        next_state = dataclasses.replace(self, checked_at=now, connected_at=now if connected else self.connected_at)
        return next_state, slept_s if slept_s > _SUSPENDED_S else 0.0

    def lost_cluster(self, now: float, worker_fault: str | None) -> Loss | None:
        """Return the loss of all ranks if the driver's own worker has ended, or the scheduler is lost; else None."""
        if worker_fault is not None:
            return Loss(FaultKind.WORKER_LOST, worker_fault)
        if now - self.connected_at > _SCHEDULER_LOST_S:
            return Loss(FaultKind.WORKER_LOST, "the Dask scheduler has ended")
        return None

    def lost_ranks(
        self, ranks: Sequence[RankState], activities: Sequence[Activity], now: float
    ) -> Iterator[tuple[RankState, Loss]]:
        """Yield ranks that are lost. All messages that had arrived at the time `now` must have been read."""
        waiting = [pair for pair in zip(ranks, activities, strict=True) if pair[0].submitted_at and not pair[0].over]
        yield from self._silent([pair for pair in waiting if pair[1].notice_at], now)
        yield from self._not_begun([rank for rank, activity in waiting if not activity.notice_at], now)

    def _silent(self, running: Sequence[tuple[RankState, Activity]], now: float) -> Iterator[tuple[RankState, Loss]]:
        """Yield the ranks whose workers were silent for too long, because a cut network closes no connection."""
        silent = [rank for rank, activity in running if now - activity.notice_at > self.lost_after_s]
        alone = len(silent) < len(running) or len({rank.place.slot.host for rank, _ in running}) == 1
        for rank in silent:
            host = f"host {rank.place.host}" if alone else "the cluster"
            text = f"no message came from {host} for {self.lost_after_s:g} s: is it down, or the network to it?"
            yield rank, Loss(FaultKind.WORKER_LOST, text)

    def _not_begun(self, submitted: Sequence[RankState], now: float) -> Iterator[tuple[RankState, Loss]]:
        """Yield the ranks that their workers have not started in time."""
        for rank in submitted:
            if now - rank.submitted_at > self.start_timeout_s:
                text = (
                    f"the Dask worker {rank.worker} of host {rank.place.host} has not started it within "
                    f"{self.start_timeout_s:g} s (cluster.start_timeout_s): is this too short, or is the worker busy "
                    "with other tasks?"
                )
                yield rank, Loss(FaultKind.INFRASTRUCTURE, text)
