"""The state of clusters: whether the scheduler answers, the workers, and the runs."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from ddptrain.clusters import record as records
from ddptrain.clusters.processes import Relation
from ddptrain.clusters.record import ClusterRecord
from ddptrain.clusters.resolve import Target, of_cluster

LOOK_TIMEOUT_S = 2.0
_REFUSED_S = 0.3  # a scheduler that has ended refuses connections for that long


class State(StrEnum):
    """Whether a cluster can be used."""

    UP = "up"
    STARTING = "starting"
    ENDED = "ended"
    ELSEWHERE = "elsewhere"  # on another host: its state is not known here


@dataclass(frozen=True, slots=True)
class View:
    """The state of a cluster at one moment. `reason`: why it is not up; `certain` is False if it may just be slow.

    `workers`, `runs` and `waiting` are those of `slots.overview`.
    """

    cluster: ClusterRecord
    state: State
    reason: str = ""
    certain: bool = True
    workers: Sequence[Mapping[str, Any]] = ()
    runs: Sequence[Mapping[str, Any]] = ()
    waiting: Sequence[Mapping[str, Any]] = ()

    def total(self, what: str) -> int:
        """Return the sum of all workers: their slots, free (slots that no run holds), or gpus."""
        return sum(int(worker[what]) for worker in self.workers)

    @property
    def hosts(self) -> list[str]:
        """The hosts of the workers, each once."""
        return [*dict.fromkeys(str(worker["host"]) for worker in self.workers)]

    def as_dict(self) -> dict[str, Any]:
        """Return the view as plain data, for --json."""
        record = self.cluster
        return {
            "name": record.name,
            "backend": record.backend,
            "state": str(self.state),
            "reason": self.reason,
            "address": record.address,
            "tls": record.address.startswith("tls://"),
            "started_at": record.started_at,
            "host": record.host.name,
            "idle_timeout_s": record.config.idle_timeout_s,
            **{name: self.total(name) for name in ("slots", "free", "gpus")},
            "hosts": self.hosts,
            "workers": self.workers,
            "runs": self.runs,
            "waiting": self.waiting,
            "parts": [part.model_dump() for part in record.parts],
        }


def every() -> list[View]:
    """Return all clusters of this user, checked in parallel within LOOK_TIMEOUT_S."""

    async def probed() -> list[View]:
        return list(await asyncio.gather(*(_probe(cluster, LOOK_TIMEOUT_S) for cluster in records.every())))

    return [_if_starting(view) for view in asyncio.run(probed())]


def at(cluster: ClusterRecord) -> View:
    """Return one cluster, checked within LOOK_TIMEOUT_S."""
    return _if_starting(probe(cluster, LOOK_TIMEOUT_S))


def probe(cluster: ClusterRecord, timeout_s: float) -> View:
    """Return one cluster as its scheduler reports it, for the command that holds its lock."""
    return asyncio.run(_probe(cluster, timeout_s))


def overview(cluster: ClusterRecord, timeout_s: float, *, counts: bool = False, close: bool = False) -> View:
    """Return a cluster that is up. Raises OSError, TimeoutError, and the exceptions of its scheduler.

    counts: the call counts as use of the cluster. close: from now on it refuses runs, unless it has some.
    """
    from ddptrain.clusters.scheduler import slots

    function, given = (slots.close, {}) if close else (slots.overview, {"counts": counts})
    called = call(of_cluster(cluster), timeout_s, function, **given)
    return View(cluster, State.UP, "", True, **asyncio.run(called))


def _if_starting(view: View) -> View:
    all_there = view.state == State.UP and len(view.workers) >= max(1, view.cluster.workers)
    if (
        view.state == State.ELSEWHERE
        or (all_there and all(worker["warm"] is not False for worker in view.workers))
        or not records.is_locked(view.cluster.name)
    ):
        return view
    return dataclasses.replace(view, state=State.STARTING, reason="a command is starting or ending it now")


async def _probe(cluster: ClusterRecord, timeout_s: float) -> View:
    address = cluster.address
    if cluster.problem:
        return View(cluster, State.ENDED, cluster.problem, certain=False)
    if where := cluster.elsewhere:
        return View(cluster, State.ELSEWHERE, f"it runs on {where}", certain=False)
    if ended := cluster.written("ended.json"):
        return View(cluster, State.ENDED, f"it ended by itself at {ended.get('at')}: {ended.get('reason')}")
    if not address:
        return View(cluster, State.ENDED, "its start was interrupted")
    if cluster.relation == Relation.RESTARTED:
        return View(cluster, State.ENDED, f"{cluster.host.name} was restarted after the cluster was started")
    from ddptrain.clusters.scheduler import slots

    try:
        return View(cluster, State.UP, "", True, **await call(of_cluster(cluster), timeout_s, slots.overview))
    except ConnectionRefusedError as error:
        return View(cluster, State.ENDED, str(error))
    except Exception as error:
        reason = str(error) or f"no answer within {timeout_s:g} s"
        return View(cluster, State.ENDED, f"{address} can't be asked: {reason}", certain=False)


async def call(target: Target, timeout_s: float, function: Callable[..., Any], /, **given: Any) -> Any:
    """Return the result of a function that takes `dask_scheduler`. Raises OSError, TimeoutError, and its exceptions.

    It needs no client, which would count as use of the cluster.
    """
    result = _result(await _sent(target, timeout_s, {"op": "run_function", **_pickled(function, given)}))
    if isinstance(result, Exception):
        raise result
    return result


async def call_workers(
    target: Target, timeout_s: float, function: Callable[..., Any], /, **given: Any
) -> dict[str, Any]:
    """Return the result of a function that takes `dask_worker`, or its exception, by worker. Raises as `call`."""
    message = {"op": "broadcast", "msg": {"op": "run", **_pickled(function, given)}, "on_error": "ignore"}
    return {worker: _result(answer) for worker, answer in (await _sent(target, timeout_s, message)).items()}


async def _sent(target: Target, timeout_s: float, message: Mapping[str, Any]) -> Any:
    """Return the answer of a scheduler. Raises ConnectionRefusedError if there is none, OSError, TimeoutError."""
    from distributed import Security
    from distributed.comm.core import connect
    from distributed.core import send_recv

    options = (target.security or Security()).get_connection_args("client")
    deadline = time.monotonic() + timeout_s
    for try_s in (min(_REFUSED_S, timeout_s), timeout_s):
        try:
            comm = await asyncio.wait_for(connect(target.address, timeout=try_s, **options), try_s + _REFUSED_S)
            break
        except OSError:
            if await _is_refused(target.address):
                raise ConnectionRefusedError(f"no scheduler listens at {target.address} any more") from None
            if try_s == timeout_s:
                raise
    try:
        return await asyncio.wait_for(send_recv(comm, **message), max(0.1, deadline - time.monotonic()))
    finally:
        comm.abort()


def _pickled(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    from distributed.protocol.pickle import dumps

    return {"function": dumps(function), "args": dumps(()), "kwargs": dumps(dict(given)), "wait": True}


def _result(answer: Mapping[str, Any]) -> Any:
    if answer["status"] == "OK":
        return answer["result"]
    from distributed.core import clean_exception

    return clean_exception(**answer)[1]


async def _is_refused(address: str) -> bool:
    """Return whether it is certain that nothing listens there."""
    place = urlsplit(address)
    try:
        connecting = asyncio.open_connection(place.hostname, place.port)
        (await asyncio.wait_for(connecting, 1.0))[1].close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False
