"""Waits for a cluster that is starting: until its workers have joined and their rank servers are warm."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, cast

from ddptrain.clusters import status
from ddptrain.clusters.cluster_records import Deployment
from ddptrain.clusters.provider import Provider, Tell
from ddptrain.clusters.resolve import Target, of_deployment
from ddptrain.clusters.scheduler import slots
from ddptrain.clusters.signals import deferred
from ddptrain.clusters.status import View, WorkerView
from ddptrain.config.wording import counted
from ddptrain.errors import ClusterError
from ddptrain.worker import driver_calls

if TYPE_CHECKING:
    from distributed import Client

_POLL_S = 0.02
_WARM_ROUND_S = 1.0  # seconds that one check waits for the workers to become warm
_FAULT_EVERY_S = 2.0  # seconds; each check costs a call to the batch system or the remote host
_LAST_LOOK_S = 1.0  # for workers that joined while others were still being started
_LOG_LINES = 12
_CLOSE_S = 2.0  # for closing the connection


class ReadinessWait:
    """The wait for one cluster, which may take `timeout_s`, counted from `began` (monotonic seconds)."""

    def __init__(self, deployment: Deployment, provider: Provider, tell: Tell, timeout_s: float, began: float) -> None:
        self.deployment = deployment
        self.provider = provider
        self.tell = tell
        self.timeout_s = timeout_s
        self.deadline = max(began + timeout_s, time.monotonic() + _LAST_LOOK_S)
        self._client: Client | None = None
        self._asked_fault_at = time.monotonic()
        self._address = ""  # the last scheduler address that was shown
        self._joined = ""  # the last number of workers that was shown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.close(timeout=_CLOSE_S)

    def view(self) -> View:
        """Return the cluster as it is now. Raises ClusterError if its scheduler does not answer in time."""
        try:
            overview = self._overview()
        except (OSError, TimeoutError) as error:
            address = self.deployment.record.address
            raise ClusterError(f"the scheduler at {address} does not answer: {error}{self._last_words()}") from error
        except ImportError as error:  # raised in the process of the scheduler
            raise ClusterError(
                f"the scheduler at {self.deployment.record.address} can't be used ({error}): install ddptrain "
                "on the hosts of the scheduler and of the workers"
            ) from error
        return status.seen(self.deployment, overview)

    def _overview(self) -> Mapping[str, Any]:
        """Return the answer of the scheduler. Raises OSError or TimeoutError."""
        if self._client is not None:
            return cast(Mapping[str, Any], self._client.run_on_scheduler(slots.overview))
        while True:
            client = None
            try:
                client = self._connected()
                overview = client.run_on_scheduler(slots.overview)
            except OSError as error:  # a forwarded port accepts connections before the scheduler does, and closes them
                if client is not None:
                    client.close(timeout=_CLOSE_S)
                elif not _is_closed(error):
                    raise
                self._pause(lambda error=error: f"the scheduler at {self._address} does not answer ({error})")
            else:
                self._client = client
                return cast(Mapping[str, Any], overview)

    def until_ready(self, asked: int | None) -> View:
        """Wait until all workers are warm, with `asked` slots (None: any). Raises ClusterError with their logs."""
        while True:
            view = self.view()
            expected = max(1, self.deployment.record.workers)
            self._tell_joined(view, expected)
            all_there = len(view.workers) >= expected
            if all_there and view.slots >= (asked or 1):
                if (warm := self._warm(view)) is not None:
                    self.tell("warm")
                    return warm
            elif all_there and self.deployment.record.workers:
                raise ClusterError(
                    f"{self._came(view, asked)}, and no more workers are starting{self._last_words(view)}"
                )
            self._pause(lambda view=view: self._came(view, asked), view)

    def until_shrunk(self, asked: int) -> View:
        """Wait until the cluster has at most `asked` slots, not counting slots in use. Raises ClusterError."""
        while True:
            view = self.view()
            if view.slots <= max(asked, sum(worker.held for worker in view.workers)):
                return view
            self._pause(lambda view=view: f"{counted(view.slots, 'slot')} left, {asked} requested,", view)

    def _connected(self) -> Client:
        with deferred():  # an interrupted import leaves a broken module, which the clean-up may need
            from distributed import Client

        logging.getLogger("distributed").setLevel(logging.CRITICAL)  # errors are reported here
        target = self._target()
        if target.address != self._address:
            self.tell(f"scheduler at {target.address}")
            self._address = target.address
        timeout_s = max(1.0, self.deadline - time.monotonic())
        return Client(
            target.address, security=target.security, timeout=timeout_s, name="ddptrain-up", set_as_default=False
        )

    def _target(self) -> Target:
        while not self.deployment.record.address:
            self._pause(lambda: "no scheduler has come up")
        return of_deployment(self.deployment)

    def _tell_joined(self, view: View, expected: int) -> None:
        joined = f"{len(view.workers)} of {counted(expected, 'worker')} joined, {counted(view.slots, 'slot')}"
        if view.workers and joined != self._joined:
            self.tell(joined)
        self._joined = joined

    def _warm(self, view: View) -> View | None:
        """Return the view if all workers are warm within 1 s, else None. Raises ClusterError for an unusable worker."""
        assert self._client is not None
        answers: Mapping[str, Any] = self._client.run(driver_calls.wait_until_warm, _WARM_ROUND_S, on_error="return")
        workers = []
        for worker in view.workers:
            answer = answers.get(worker.address)
            if isinstance(answer, Exception) and not isinstance(answer, OSError):
                raise ClusterError(f"the worker on {_place(worker)} can't be used: {answer!r}{self._last_words()}")
            if not isinstance(answer, Mapping):
                return None  # the worker has just left
            if answer["fault"]:
                raise ClusterError(f"the worker on {_place(worker)} can't be used: {answer['fault']}")
            if answer["ours"] and not answer["warm"]:
                return None
            workers.append(dataclasses.replace(worker, warm=answer["warm"] if answer["ours"] else None))
        return dataclasses.replace(view, workers=tuple(workers))

    def _pause(self, what: Any, view: View | None = None) -> None:
        """Sleep for one poll interval. Raises ClusterError if the time is over or a part of the cluster has failed."""
        now = time.monotonic()
        if now > self.deadline:
            raise ClusterError(f"{what()} within {self.timeout_s:g} s{self._last_words(view)}")
        if now - self._asked_fault_at > _FAULT_EVERY_S:
            self._asked_fault_at = now
            if (reason := fault(self.provider, self.deployment)) is not None:
                raise ClusterError(f"{what()}: {reason}{self._last_words(view)}")
        time.sleep(_POLL_S)

    def _came(self, view: View, asked: int | None) -> str:
        room: Counter[str] = Counter()
        for worker in view.workers:
            room[_place(worker)] += worker.slots
        sources = f" ({', '.join(f'{count} from {place}' for place, count in room.items())})" if room else ""
        if asked is not None:
            return f"{counted(asked, 'slot')} needed, but only {view.slots} joined{sources}"
        ordered = counted(max(1, self.deployment.record.workers), "worker")
        return f"{ordered} ordered, {len(view.workers)} joined with {counted(view.slots, 'slot')}{sources}"

    def _last_words(self, view: View | None = None) -> str:
        words = last_words(self.provider, self.deployment, view)
        return f"\n{words}" if words else ""


def last_words(provider: Provider, deployment: Deployment, view: View | None = None) -> str:
    """Return the last log lines of the processes that have not joined; without a `view`, of all processes."""
    workers = view.workers if view is not None else ()
    joined = {name for worker in workers for name in (worker.host, worker.name)} | ({"scheduler"} if workers else set())
    quotes = [
        f"last lines of {source}:\n  " + text.strip().replace("\n", "\n  ")
        for source, text in provider.logs(deployment, _LOG_LINES).items()
        if text.strip() and not joined.intersection(source.split())
    ]
    return "\n".join(quotes)


def fault(provider: Provider, deployment: Deployment) -> str | None:
    """Return which part of a cluster has ended or will never run; None if there is none, or it is not known."""
    ask = getattr(provider, "fault", None)  # optional for providers
    reason: str | None = ask(deployment) if ask is not None else None
    return reason


def _is_closed(error: OSError) -> bool:
    """Return whether the other side only closed the connection; an error that Dask calls fatal is final."""
    from distributed.comm.core import CommClosedError, FatalCommClosedError

    return isinstance(error, CommClosedError) and not isinstance(error, FatalCommClosedError)


def _place(worker: WorkerView) -> str:
    return worker.host if worker.name in (worker.host, worker.address) else f"{worker.name} ({worker.host})"
