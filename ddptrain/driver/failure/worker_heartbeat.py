"""Who is still there: workers that have gone without a word, or are cut off, or never begin with their rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ddptrain.driver.failure.fault import Kind
from ddptrain.driver.rank_state import RankWatch

_SCHEDULER_LOST_S = 3.0  # without a connection to the scheduler, before the run is given up
_STOPPED_S = 3.0  # between two looks of ours: this process was suspended itself, and has heard nobody


@dataclass(frozen=True, slots=True)
class Loss:
    """A rank of which nothing more will be heard: with its worker (WORKER_LOST), or by itself."""

    watch: RankWatch
    kind: Kind
    text: str


class Presence:
    """Looks, every fraction of a second, at what sends no message when it goes.

    `worker_fault` tells of a worker that the driver itself has started, `connected` whether the scheduler is there.
    A worker that says nothing for `lost_after_s` is gone, or cut off. `suspended` is told for how many seconds this
    process has slept.
    """

    def __init__(
        self,
        ranks: Sequence[RankWatch],
        worker_fault: Callable[[], str | None],
        connected: Callable[[], bool],
        start_timeout_s: float,
        lost_after_s: float,
        suspended: Callable[[float], None],
    ) -> None:
        self.ranks = ranks
        self.worker_fault, self.connected, self.suspended = worker_fault, connected, suspended
        self.start_timeout_s, self.lost_after_s = start_timeout_s, lost_after_s
        self.connected_at = self.looked_at = time.monotonic()

    def losses(self, now: float, *, all_read: bool) -> Iterator[Loss]:
        """Ranks to be given up, as of `now` (monotonic seconds); `all_read` says that no message waits."""
        yield from self._of_all(now)
        slept_s = now - self.looked_at
        self.looked_at = now
        if slept_s > _STOPPED_S:
            for watch in self.ranks:
                watch.heard_at = watch.heard_at and now
            self.suspended(slept_s)
        if all_read:
            yield from self._silent(now)
            yield from self._not_begun(now)

    def _of_all(self, now: float) -> Iterator[Loss]:
        text = self.worker_fault()
        if self.connected():
            self.connected_at = now
        elif text is None and now - self.connected_at > _SCHEDULER_LOST_S:
            text = "the Dask scheduler is gone"
        if text is not None:
            yield from (Loss(watch, Kind.WORKER_LOST, text) for watch in self.ranks)

    def _silent(self, now: float) -> Iterator[Loss]:
        """A cut cable sends no message: workers that have said nothing for too long."""
        running = [watch for watch in self.ranks if watch.heard_at and not watch.over]
        silent = [watch for watch in running if now - watch.heard_at > self.lost_after_s]
        alone = len(silent) < len(running) or len({watch.place.slot.host for watch in running}) == 1
        for watch in silent:
            host = f"host {watch.place.host}" if alone else "the cluster"
            text = f"nothing was heard from {host} for {self.lost_after_s:g} s: is it down, or the network to it?"
            yield Loss(watch, Kind.WORKER_LOST, text)

    def _not_begun(self, now: float) -> Iterator[Loss]:
        """A worker of others may be busy with other work, and never come to the rank: a gang must not wait for it."""
        for watch in self.ranks:
            waits = watch.submitted_at and not watch.heard_at and not watch.over
            if waits and now - watch.submitted_at > self.start_timeout_s:
                worker, host = watch.place.slot.worker, watch.place.host
                text = (
                    f"the Dask worker {worker} of host {host} has not begun with it within {self.start_timeout_s:g} s"
                )
                yield Loss(watch, Kind.INFRASTRUCTURE, f"{text}: is it busy with other tasks?")
