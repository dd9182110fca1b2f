"""Clusters that outlive the command that starts them: up, logs, down."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shlex
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from ddptrain.clusters import record as records
from ddptrain.clusters import resolve, status
from ddptrain.clusters.provider import Backend, Tell
from ddptrain.clusters.record import ClusterRecord
from ddptrain.clusters.security import make_tls
from ddptrain.clusters.signals import deferred
from ddptrain.clusters.status import State, View
from ddptrain.config.sections.clusters import provider_class
from ddptrain.config.wording import counted, did_you_mean, shorten
from ddptrain.errors import ClusterError, DdptrainError, UsageError
from ddptrain.log import Log

if TYPE_CHECKING:
    from ddptrain.config.sections.clusters import ClusterConfig

_log = Log(__name__)
_SURE_S = 10.0  # a cluster that does not answer for that long has failed, and is cleaned up
_END_S = 60.0  # another command may need that long to clean up a failed start
_NOT_OF_THE_CLUSTER = frozenset({"name", "start_timeout_s", "wait_s", "priority"})
_POLL_S = 0.02
_WARM_ROUND_S = 1.0  # seconds that one check waits for the workers to become warm
_FAULT_EVERY_S = 2.0  # seconds; each check costs a call to the batch system or the remote host
_LAST_LOOK_S = 1.0  # for workers that joined while others were still being started
_LOG_LINES = 12


def up(config: ClusterConfig, name: str, tell: Tell, *, if_needed: bool = False) -> View:
    """Start a cluster and wait until all its workers are warm.

    With `if_needed`, a cluster that is up with the same settings is the result, not an error; if another command is
    starting or ending the cluster, this one waits for that command first.

    Raises:
        UsageError: it is up already, or up with other settings, or the backend does not support a setting.
        ClusterError: it did not come up in time, and nothing of it is left; it is up, but has lost workers; or one of
            that name is on another host.
    """
    backend = _backend(config.backend)
    patience_s = {}
    if if_needed:
        patience_s = {"patience_s": config.start_timeout_s + _END_S}
        if records.is_locked(name):
            tell(f"another command is starting or ending the cluster {name}: waiting for it")
    with records.locked(name, **patience_s):
        if (view := _look_or_clean_up(name, tell)) is None:
            return _start(config, name, backend, tell)
    if not if_needed:
        raise UsageError(f"the cluster {name} is up at {view.cluster.address}, {view.total('slots')} slots")
    _check_same(view, config)
    tell(f"the cluster {name} is up already")
    return view


def _start(config: ClusterConfig, name: str, backend: Backend, tell: Tell) -> View:
    began = time.monotonic()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    cluster = records.create(ClusterRecord(name=name, config=config, started_at=now))
    _log.info("cluster starts", cluster=name, backend=config.backend, folder=cluster.folder)
    try:
        with deferred(breakable=True) as check_signals:
            if backend.tls:
                make_tls(cluster.folder)
            # The generator is closed before the clean-up: it waits for what it is starting at the moment.
            with contextlib.closing(backend.start(cluster, tell)) as parts:
                for part in parts:
                    cluster.keep(part)
                    check_signals()
            view = _until_warm(cluster, backend, tell, began, check_signals)
        cluster.save()
    except BaseException as error:
        with deferred():
            tell("ending what was started")
            try:
                _end(cluster, backend, tell)
            except DdptrainError as stuck:
                raise ClusterError(f"{error}; {stuck}; try ddptrain cluster down {name}") from error
        raise
    took_s = time.monotonic() - began
    _log.info("cluster is up", cluster=name, address=cluster.address, slots=view.total("slots"), took_s=took_s)
    if cluster.address.startswith("tcp://"):
        tell(
            f"warning: the scheduler at {cluster.address} asks for no certificate: everyone who can reach it can run "
            "programs as you on its workers"
        )
    return view


def _until_warm(
    cluster: ClusterRecord, backend: Backend, tell: Tell, began: float, check_signals: Callable[[], None]
) -> View:
    """Wait until all workers are warm, for `cluster.start_timeout_s` from `began` (monotonic seconds).

    Raises ClusterError with their logs if they are not, or if a part of the cluster has failed.
    """
    timeout_s, ranks = cluster.config.start_timeout_s, cluster.config.ranks
    asked, expected = ranks if isinstance(ranks, int) else 1, max(1, cluster.workers)
    deadline = max(began + timeout_s, time.monotonic() + _LAST_LOOK_S)
    asked_fault_at = time.monotonic()
    shown: set[str] = set()

    def show(text: str) -> None:
        if text not in shown:
            shown.add(text)
            tell(text)

    while True:
        check_signals()
        now = time.monotonic()
        view, state, reason = None, "no scheduler has come up", ""
        if address := cluster.read_address().address:
            show(f"scheduler at {address}")
            view, state = _seen(cluster, max(1.0, deadline - now))
        if view is not None and view.workers:
            show(state)
        if view is not None and len(view.workers) >= expected:
            if view.total("slots") >= asked:
                warm, fault = _warm(view)
                if warm and not fault:
                    tell("warm")
                    return dataclasses.replace(view, workers=warm)
                reason = fault
            elif cluster.workers:
                reason = f"{counted(asked, 'slot')} needed, and no more workers are starting"
        if not reason and now > deadline:
            reason = f"not warm within {timeout_s:g} s"
        if not reason and now - asked_fault_at > _FAULT_EVERY_S:
            asked_fault_at = now
            reason = backend.fault(cluster) or ""
        if reason:
            raise ClusterError("\n".join(filter(None, (f"{state}: {reason}", _last_words(backend, cluster, view)))))
        time.sleep(_POLL_S)


def _seen(cluster: ClusterRecord, timeout_s: float) -> tuple[View | None, str]:
    """Return the cluster as its scheduler reports it, if it answers, and its state in words. Raises ClusterError."""
    try:
        view = status.overview(cluster, timeout_s, counts=True)
    except ImportError as error:  # raised in the process of the scheduler
        raise ClusterError(
            f"the scheduler at {cluster.address} can't be used ({error}): install ddptrain on the hosts of the "
            "scheduler and of the workers"
        ) from error
    except OSError as error:  # a forwarded port accepts connections before the scheduler does, and closes them
        return None, f"the scheduler at {cluster.address} does not answer ({error})"
    expected = counted(max(1, cluster.workers), "worker")
    return view, f"{len(view.workers)} of {expected} joined, {counted(view.total('slots'), 'slot')}"


def _warm(view: View) -> tuple[list[Mapping[str, Any]], str]:
    """Return all workers if they are warm within 1 s, else none, and why a worker can't be used."""
    from ddptrain.worker import driver_calls

    target = resolve.of_cluster(view.cluster)
    answers = asyncio.run(
        status.call_workers(target, _WARM_ROUND_S + _SURE_S, driver_calls.wait_until_warm, timeout_s=_WARM_ROUND_S)
    )
    warm: list[Mapping[str, Any]] = []
    for worker in view.workers:
        answer = answers.get(worker["address"], {"fault": None, "ours": True, "warm": False})  # it has just left
        fault = repr(answer) if isinstance(answer, Exception) else answer["fault"]
        if fault:
            return [], f"the worker on {_place(worker)} can't be used: {fault}"
        if answer["ours"] and not answer["warm"]:
            return [], ""
        warm.append({**worker, "warm": answer["warm"] if answer["ours"] else None})
    return warm, ""


def _look_or_clean_up(name: str, tell: Tell) -> View | None:
    """Return the cluster if it is up; otherwise end its remaining processes.

    Raises UsageError if it is uncertain whether the cluster is up; ClusterError.
    """
    try:
        cluster = records.find(name)
    except records.ClusterNotFound:
        return None
    cluster.check_here(f"or choose another --name; {_forget(cluster)}")
    view = status.probe(cluster, _SURE_S)
    if view.state == State.UP:
        return view
    if not view.certain:
        raise UsageError(f"there is a cluster {name}: {view.reason}; if it is dead, ddptrain cluster down {name}")
    tell(f"a cluster {name} was there before: {view.reason}; cleaning up")
    _end(cluster, _backend(cluster.backend), tell)
    return None


def _check_same(view: View, config: ClusterConfig) -> None:
    """Raise UsageError if the running cluster has other settings, ClusterError if it has lost workers."""
    cluster, name = view.cluster, view.cluster.name
    started, asked = cluster.config.model_dump(by_alias=True), config.model_dump(by_alias=True)
    fields = sorted({*started, *asked} - _NOT_OF_THE_CLUSTER)
    changes = [f"cluster.{field}" for field in fields if started.get(field) != asked.get(field)]
    if changes:
        raise UsageError(
            f"the cluster {name} is up at {cluster.address} with other settings ({', '.join(changes)}): leave them "
            f"as they were, choose another --name, or end it with `ddptrain cluster down {name}`"
        )
    if (lost := cluster.workers - len(view.workers)) > 0:
        raise ClusterError(
            f"the cluster {name} is up at {cluster.address}, but has lost {counted(lost, 'worker')}: end it with "
            f"`ddptrain cluster down {name}`, and start it again"
        )


def logs(name: str, lines: int, source: str | None = None) -> dict[str, str]:
    """Return the last log lines of each process, also of ended processes. Raises UsageError, ClusterError."""
    cluster = records.find(name)
    cluster.check_here()
    found = dict(_backend(cluster.backend).logs(cluster, lines))
    if source is None:
        return found
    chosen = {each: text for each, text in found.items() if source == each or source in each.split()}
    if not chosen:
        hint = did_you_mean(source, list(found))
        raise UsageError(f'the cluster {name} has no log "{shorten(source)}" ({hint})')
    return chosen


def last_words(name: str) -> str:
    """Return the last log lines of the processes that have not joined the cluster, for an error message."""
    try:
        cluster = records.find(name)
        view = status.probe(cluster, status.LOOK_TIMEOUT_S)
        return _last_words(_backend(cluster.backend), cluster, view)
    except DdptrainError as error:
        return f"its logs can't be read: {error}"


def ended_process(name: str) -> str | None:
    """Return which process of a cluster has ended; None if all run, or if a command may be starting it again."""
    with contextlib.suppress(DdptrainError):  # its record was deleted meanwhile
        if not records.is_locked(name):  # first, so that the record has what that command has started
            cluster = records.find(name)
            return _backend(cluster.backend).fault(cluster)
    return None


def down(name: str, tell: Tell, *, now: bool = False) -> None:
    """End a cluster and delete its record. Raises UsageError if runs are on it and not `now`, ClusterError."""
    records.find(name)
    with records.locked(name), deferred(breakable=True) as check_signals:
        cluster = records.find(name)
        cluster.check_here(_forget(cluster))
        view = None if now else status.probe(cluster, _SURE_S)
        if view and view.state == State.UP and not (view.runs or view.waiting):
            with contextlib.suppress(Exception):  # it failed meanwhile, or is of a version without this call
                view = status.overview(cluster, _SURE_S, close=True)
        if view and (runs := [run["run_id"] for run in (*view.runs, *view.waiting)]):
            raise UsageError(
                f"the cluster {name} is in use by {', '.join(runs)}: wait for the end, or end it all with "
                f"ddptrain cluster down {name} --now"
            )
        check_signals()
        _end(cluster, _backend(cluster.backend), tell)


def _end(cluster: ClusterRecord, backend: Backend, tell: Tell) -> None:
    _log.info("cluster ends", cluster=cluster.name)
    with deferred():
        backend.stop(cluster, tell)
        cluster.remove()


def _last_words(backend: Backend, cluster: ClusterRecord, view: View | None = None) -> str:
    """Return the last log lines of the processes that have not joined; without a `view`, of all processes."""
    workers = view.workers if view is not None else ()
    joined = {worker[name] for worker in workers for name in ("host", "name")} | ({"scheduler"} if workers else set())
    quotes = [
        f"last lines of {source}:\n  " + text.strip().replace("\n", "\n  ")
        for source, text in backend.logs(cluster, _LOG_LINES).items()
        if text.strip() and not joined.intersection(source.split())
    ]
    return "\n".join(quotes)


def _place(worker: Mapping[str, Any]) -> str:
    host, name = worker["host"], worker["name"]
    return str(host) if name in (host, worker["address"]) else f"{name} ({host})"


def _forget(cluster: ClusterRecord) -> str:
    return f"if that machine will not come back, forget the cluster: rm -r {shlex.quote(str(cluster.folder))}"


def _backend(name: str) -> Backend:
    return cast(Backend, provider_class(name)())
