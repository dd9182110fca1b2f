"""The state of clusters: whether the scheduler answers, the hosts, and the runs."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from ddptrain.clusters import record as records
from ddptrain.clusters.hosts import Relation
from ddptrain.clusters.record import ClusterRecord
from ddptrain.clusters.resolve import Target, of_cluster
from ddptrain.clusters.scheduler.scheduler_process import LOOKER

LOOK_TIMEOUT_S = 2.0
_LEAVE_S = 0.3
_PATIENCE_S = 0.3  # seconds; most schedulers answer within it, and the port is probed only after it


class State(StrEnum):
    """Whether a cluster can be used."""

    UP = "up"
    STARTING = "starting"
    ENDED = "ended"
    ELSEWHERE = "elsewhere"  # on another host: its state is not known here


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker: its slots, how many have a GPU, how many are in use; `warm` is None for foreign workers."""

    host: str
    name: str
    address: str
    slots: int
    held: int
    gpus: int
    warm: bool | None

    @property
    def free(self) -> int:
        """Slots that no run holds."""
        return max(0, self.slots - self.held)


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """A run with the slots that it holds, or waits for (`asked`, None: all) since `waited_s` seconds."""

    run_id: str
    slots: int = 0
    hosts: tuple[str, ...] = ()
    asked: int | None = None
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class View:
    """The state of a cluster at one moment. `reason`: why it is not up; `certain` is False if it may just be slow."""

    cluster: ClusterRecord
    state: State
    reason: str = ""
    certain: bool = True
    workers: tuple[WorkerView, ...] = ()
    runs: tuple[ClusterRun, ...] = ()
    waiting: tuple[ClusterRun, ...] = ()

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self.cluster.name

    @property
    def slots(self) -> int:
        """Slots of all workers."""
        return sum(worker.slots for worker in self.workers)

    @property
    def free(self) -> int:
        """Slots that no run holds."""
        return sum(worker.free for worker in self.workers)

    @property
    def gpus(self) -> int:
        """GPUs of all workers."""
        return sum(worker.gpus for worker in self.workers)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the workers, each once."""
        return tuple(dict.fromkeys(worker.host for worker in self.workers))

    def as_dict(self) -> dict[str, Any]:
        """Return the view as plain data, for --json."""
        record = self.cluster
        return {
            "name": self.name,
            "backend": record.backend,
            "state": str(self.state),
            "reason": self.reason,
            "address": record.address,
            "tls": record.address.startswith("tls://"),
            "started_at": record.started_at,
            "host": record.host.name,
            "idle_timeout_s": record.config.idle_timeout_s,
            "slots": self.slots,
            "free": self.free,
            "gpus": self.gpus,
            "hosts": list(self.hosts),
            "workers": [{**dataclasses.asdict(worker), "free": worker.free} for worker in self.workers],
            "runs": [{"run_id": run.run_id, "slots": run.slots, "hosts": list(run.hosts)} for run in self.runs],
            "waiting": [
                {"run_id": run.run_id, "place": place, "asked": run.asked, "waited_s": run.waited_s}
                for place, run in enumerate(self.waiting, 1)
            ],
            "parts": [
                {**part.model_dump(include={"role", "host", "id", "log"}), "pid": part.process and part.process.pid}
                for part in record.parts
            ],
        }


def every() -> list[View]:
    """Return all clusters of this user, checked in parallel within LOOK_TIMEOUT_S."""
    return [_if_starting(view) for view in _probe(records.every(), LOOK_TIMEOUT_S)]


def at(cluster: ClusterRecord) -> View:
    """Return one cluster, checked within LOOK_TIMEOUT_S."""
    return _if_starting(probe(cluster, LOOK_TIMEOUT_S))


def probe(cluster: ClusterRecord, timeout_s: float) -> View:
    """Return one cluster as its scheduler reports it, for the command that holds its lock."""
    return _probe([cluster], timeout_s)[0]


def refuse_runs(cluster: ClusterRecord, timeout_s: float) -> View:
    """Return a cluster whose scheduler refuses runs from now on, unless the view has runs. Raises any exception."""
    from ddptrain.clusters.scheduler import slots

    return seen(cluster, asyncio.run(ask_scheduler(of_cluster(cluster), slots.close, timeout_s)))


def _if_starting(view: View) -> View:
    all_there = view.state == State.UP and len(view.workers) >= max(1, view.cluster.workers)
    if (
        view.state == State.ELSEWHERE
        or (all_there and all(worker.warm is not False for worker in view.workers))
        or not records.is_locked(view.name)
    ):
        return view
    return dataclasses.replace(view, state=State.STARTING, reason="a command is starting or ending it now")


def seen(cluster: ClusterRecord, overview: Mapping[str, Any]) -> View:
    """Return the view of a cluster that is up, from the answer of its scheduler (`slots.overview`)."""
    fields = [field.name for field in dataclasses.fields(WorkerView)]
    workers = [WorkerView(**{name: worker[name] for name in fields}) for worker in overview["workers"]]
    runs = [ClusterRun(run["run_id"], run["slots"], tuple(run["hosts"])) for run in overview["runs"]]
    waiting = [ClusterRun(run["run_id"], asked=run["asked"], waited_s=run["waited_s"]) for run in overview["waiting"]]
    return View(cluster, State.UP, "", True, tuple(workers), tuple(runs), tuple(waiting))


def _probe(clusters: Sequence[ClusterRecord], timeout_s: float) -> list[View]:
    if any(cluster.address for cluster in clusters):
        import distributed

        # Dask logs every retry of a connection; the view contains the result.
        logging.getLogger(distributed.__name__).setLevel(logging.CRITICAL)

    async def probed() -> list[View]:
        return list(await asyncio.gather(*(_probe_one(cluster, timeout_s) for cluster in clusters)))

    return asyncio.run(probed())


async def _probe_one(cluster: ClusterRecord, timeout_s: float) -> View:
    if cluster.problem:
        return View(cluster, State.ENDED, cluster.problem, certain=False)
    if where := cluster.elsewhere:
        return View(cluster, State.ELSEWHERE, f"it runs on {where}", certain=False)
    ended = cluster.ended
    if ended:
        return View(cluster, State.ENDED, f"it ended by itself at {ended.get('at')}: {ended.get('reason')}")
    address = cluster.address
    if not address:
        return View(cluster, State.ENDED, "its start was interrupted")
    if cluster.relation == Relation.RESTARTED:
        return View(cluster, State.ENDED, f"{cluster.host.name} was restarted after the cluster was started")
    asked = asyncio.ensure_future(_ask(cluster, timeout_s))
    refused = asyncio.ensure_future(_is_refused(address))
    done, _ = await asyncio.wait((asked, refused), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in (asked, refused):
        task.cancel()
    await asyncio.wait((asked, refused), timeout=_LEAVE_S)
    is_certain = refused in done  # even if Dask has given up meanwhile: its error is not certain
    if asked in done and not (is_certain and asked.exception()):
        try:
            return seen(cluster, asked.result())
        except Exception as error:
            return View(cluster, State.ENDED, f"{address} can't be asked: {error}", certain=False)
    if is_certain:
        return View(cluster, State.ENDED, f"no scheduler listens at {address} any more")
    return View(cluster, State.ENDED, f"{address} does not answer within {timeout_s:g} s", certain=False)


async def ask_scheduler(target: Target, function: Callable[..., Any], timeout_s: float) -> Any:
    """Call a function in the scheduler and return its answer; this does not count as use. Raises OSError."""
    from distributed import Client

    client = Client(
        target.address,
        security=target.security,
        timeout=timeout_s,
        name=LOOKER,
        set_as_default=False,
        asynchronous=True,
    )
    try:
        await client
        return await client.run_on_scheduler(function)
    finally:
        await client.close()  # also an unconnected client: it would connect later by itself


async def _ask(cluster: ClusterRecord, timeout_s: float) -> Mapping[str, Any]:
    from ddptrain.clusters.scheduler import slots

    answer: Mapping[str, Any] = await ask_scheduler(of_cluster(cluster), slots.overview, timeout_s)
    return answer


async def _is_refused(address: str) -> None:
    """Return once it is certain that nothing listens there; never return if something does.

    Dask itself tries to connect until its timeout. These attempts start late, because each leaves a line in the
    log of a scheduler with TLS.
    """
    place = urlsplit(address)
    await asyncio.sleep(_PATIENCE_S)
    try:
        if place.scheme == "unix":
            _, writer = await asyncio.open_unix_connection(place.path)
        else:
            _, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.close()
    except (ConnectionRefusedError, FileNotFoundError):
        return
    except OSError:
        pass
    await asyncio.Event().wait()
