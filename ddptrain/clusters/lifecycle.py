"""Clusters that outlive the command that starts them: up, scale, logs, down."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from ddptrain.clusters import cluster_records, resolve, status
from ddptrain.clusters.cluster_records import ClusterRecord, Deployment
from ddptrain.clusters.provider import Provider, Tell
from ddptrain.clusters.security import make_tls
from ddptrain.clusters.signals import deferred
from ddptrain.clusters.status import State, View
from ddptrain.config import plugin_names
from ddptrain.config.wording import counted, did_you_mean, shorten
from ddptrain.errors import ClusterError, DdptrainError, UsageError
from ddptrain.log import Log

if TYPE_CHECKING:
    from ddptrain.config.sections.clusters import ClusterConfig

_EXPOSED = (
    "the scheduler at {address} asks for no certificate: everyone who can reach its port, or that of a worker, "
    "can run programs as you on every host of this cluster, and read what driver and workers send each other"
)
_log = Log(__name__)
_SURE_S = 10.0  # a cluster that does not answer for that long has failed, and is cleaned up
_END_S = 60.0  # another command may need that long to clean up a failed start
_NOT_OF_THE_CLUSTER = frozenset({"name", "start_timeout_s", "wait_s"})


def default_name(config: ClusterConfig) -> str:
    """Return the configured name or, without one, the name of the backend."""
    return config.name or config.backend


def up(config: ClusterConfig, name: str, tell: Tell, *, tls: bool | None = None) -> View:
    """Start a cluster and wait until all its workers are warm; `tls` None leaves encryption to the backend.

    Raises:
        UsageError: it is up already, or the backend does not support a setting.
        ClusterError: it did not come up in time, and nothing of it is left; or one of that name is on another host.
    """
    provider = _provider(config.backend)
    encrypts = _encrypts(provider, config.backend, tls)
    with cluster_records.locked(name):
        if (view := _look_or_clean_up(name, tell)) is not None:
            raise UsageError(f"the cluster {name} is up at {view.deployment.record.address}, {view.slots} slots")
        return _start(config, name, provider, tell, encrypts=encrypts)


def ensure_up(config: ClusterConfig, name: str, tell: Tell, *, tls: bool | None = None) -> View:
    """Like `up`, but a cluster that is up with the same settings is the result, not an error.

    If another command is starting or ending the cluster, this one waits for that command first.

    Raises:
        UsageError: it is up with other settings, or the backend does not support a setting.
        ClusterError: it did not come up in time, or has lost workers; or a cluster of that name is on another host.
    """
    provider = _provider(config.backend)
    encrypts = _encrypts(provider, config.backend, tls)
    if cluster_records.is_locked(name):
        tell(f"another command is starting or ending the cluster {name}: waiting for it")
    with cluster_records.locked(name, patience_s=config.start_timeout_s + _END_S):
        if (view := _look_or_clean_up(name, tell)) is None:
            return _start(config, name, provider, tell, encrypts=encrypts)
    _check_same(view, config, tls)
    tell(f"the cluster {name} is up already")
    return view


def _check_same(view: View, config: ClusterConfig, tls: bool | None) -> None:
    """Raise UsageError if the running cluster has other settings, ClusterError if it has lost workers."""
    record, name = view.deployment.record, view.name
    changes = different_settings(record.settings, config.model_dump(mode="json"))
    if tls is not None and tls != (view.deployment.tls_dir is not None):
        changes.append("--tls" if tls else "--no-tls")
    if changes:
        raise UsageError(
            f"the cluster {name} is up at {record.address} with other settings ({', '.join(changes)}): leave them "
            f"as they were, choose another --name, or end it with `ddptrain cluster down {name}`"
        )
    if (lost := record.workers - len(view.workers)) > 0:
        raise ClusterError(
            f"the cluster {name} is up at {record.address}, but has lost {counted(lost, 'worker')}: start what is "
            f"missing with `ddptrain cluster scale {name} SLOTS`"
        )


def different_settings(started: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Return the settings, as cluster.ranks, that differ in the running cluster, except those of start and waiting."""
    names = sorted({*started, *asked} - _NOT_OF_THE_CLUSTER)
    return [f"cluster.{name}" for name in names if started.get(name) != asked.get(name)]


def _start(config: ClusterConfig, name: str, provider: Provider, tell: Tell, *, encrypts: bool) -> View:
    deployment = _created(config, name)
    _log.info("cluster starts", cluster=name, backend=config.backend, folder=deployment.folder, tls=encrypts)
    try:
        if encrypts:
            make_tls(deployment.folder)
        return _bring_up(config, deployment, provider, tell)
    except BaseException as error:
        with deferred():
            tell("ending what was started")
            try:
                _end(deployment, provider, tell)
            except DdptrainError as stuck:
                raise ClusterError(f"{error}; {stuck}; try ddptrain cluster down {deployment.name}") from error
        raise


def scale(name: str, slots: int, tell: Tell) -> View:
    """Scale to that many slots, and wait; slots in use are removed with their runs. Raises UsageError, ClusterError."""
    from ddptrain.clusters.wait_ready import ReadinessWait

    with _held(name) as deployment:
        provider = _provider(deployment.record.backend)
        _log.info("cluster is scaled", cluster=name, slots=slots)
        resolve.reopen(deployment)
        before = status.probe(deployment, _SURE_S)
        if before.state != State.UP:
            raise ClusterError(f"the cluster {name} is not up: {before.reason}")
        began = time.monotonic()
        with deferred(breakable=True) as signals:
            provider.scale(deployment, slots, signals.checked(tell))
        timeout_s = float(deployment.record.settings["start_timeout_s"])
        with ReadinessWait(deployment, provider, tell, timeout_s, began) as waiting:
            if slots >= before.slots:
                return waiting.until_ready(slots)
            view = waiting.until_shrunk(slots)
    held = sum(worker.held for worker in view.workers)
    if held > slots:
        runs = ", ".join(run.run_id for run in view.runs)
        tell(f"{counted(held - slots, 'slot')} more until {runs} ends")
    return view


def logs(name: str, lines: int, source: str | None = None) -> dict[str, str]:
    """Return the last log lines of each process, also of ended processes. Raises UsageError, ClusterError."""
    deployment = cluster_records.find(name)
    deployment.check_here()
    found = dict(_provider(deployment.record.backend).logs(deployment, lines))
    if source is None:
        return found
    chosen = {each: text for each, text in found.items() if source == each or source in each.split()}
    if not chosen:
        hint = did_you_mean(source, list(found))
        raise UsageError(f'the cluster {name} has no log "{shorten(source)}" ({hint})')
    return chosen


def last_words(name: str) -> str:
    """Return the last log lines of the processes that have not joined the cluster, for an error message."""
    from ddptrain.clusters import wait_ready

    try:
        deployment = cluster_records.find(name)
        view = status.probe(deployment, status.LOOK_TIMEOUT_S)
        return wait_ready.last_words(_provider(deployment.record.backend), deployment, view)
    except DdptrainError as error:
        return f"its logs can't be read: {error}"


def ended_process(name: str) -> str | None:
    """Return which process of a cluster has ended; None if all run, or if a command may be starting it again."""
    from ddptrain.clusters import wait_ready

    with contextlib.suppress(DdptrainError):  # its record was deleted meanwhile
        if not cluster_records.is_locked(name):  # first, so that the record has what that command has started
            deployment = cluster_records.find(name)
            return wait_ready.fault(_provider(deployment.record.backend), deployment)
    return None


def down(name: str, tell: Tell, *, now: bool = False) -> None:
    """End a cluster and delete its record. Raises UsageError if runs are on it and not `now`, ClusterError."""
    with _held(name) as deployment:
        view = None if now else status.probe(deployment, _SURE_S)
        stays = deployment.record.parts.get("attached")  # it is another user's: only the record here is deleted
        if view and view.state == State.UP and not (view.runs or view.waiting or stays):
            with contextlib.suppress(Exception):  # it failed meanwhile, or is of a version without this call
                view = status.refuse_runs(deployment, _SURE_S)
        if view and (runs := [run.run_id for run in (*view.runs, *view.waiting)]):
            raise UsageError(
                f"the cluster {name} is in use by {', '.join(runs)}: wait for the end, or end it all with "
                f"ddptrain cluster down {name} --now"
            )
        _end(deployment, _provider(deployment.record.backend), tell)


def _created(config: ClusterConfig, name: str) -> Deployment:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    settings = config.model_dump(mode="json")
    record = ClusterRecord(name, config.backend, now, settings=settings, idle_timeout_s=config.idle_timeout_s)
    try:
        return cluster_records.create(record)
    except OSError as error:
        raise ClusterError(f"the cluster's folder {error.filename} can't be written: {error.strerror}") from error


def _bring_up(config: ClusterConfig, deployment: Deployment, provider: Provider, tell: Tell) -> View:
    began = time.monotonic()
    with deferred(breakable=True) as signals:
        provider.scale(deployment, None, signals.checked(tell))
        from ddptrain.clusters.wait_ready import ReadinessWait  # imports Dask while the processes start

    with ReadinessWait(deployment, provider, tell, config.start_timeout_s, began) as waiting:
        view = waiting.until_ready(config.ranks if isinstance(config.ranks, int) else None)
    record = deployment.record
    deployment.update(address=record.address, dashboard=record.dashboard)
    took_s = time.monotonic() - began
    _log.info("cluster is up", cluster=deployment.name, address=record.address, slots=view.slots, took_s=took_s)
    if record.address.startswith("tcp://"):
        tell(f"warning: {_EXPOSED.format(address=record.address)}")
    return view


def _look_or_clean_up(name: str, tell: Tell) -> View | None:
    """Return the cluster if it is up; otherwise end its remaining processes.

    Raises UsageError if it is uncertain whether the cluster is up; ClusterError.
    """
    try:
        deployment = cluster_records.find(name)
    except cluster_records.ClusterNotFound:
        return None
    deployment.check_here(f"or choose another --name; {_forget(deployment)}")
    resolve.reopen(deployment)
    view = status.probe(deployment, _SURE_S)
    if view.state == State.UP:
        return view
    if not view.certain:
        raise UsageError(f"there is a cluster {name}: {view.reason}; if it is dead, ddptrain cluster down {name}")
    tell(f"a cluster {name} was there before: {view.reason}; cleaning up")
    _end(deployment, _provider(deployment.record.backend), tell)
    return None


def _end(deployment: Deployment, provider: Provider, tell: Tell) -> None:
    _log.info("cluster ends", cluster=deployment.name)
    with deferred():
        provider.stop(deployment, tell)
        deployment.remove()


@contextlib.contextmanager
def _held(name: str) -> Iterator[Deployment]:
    """The cluster of that name, locked against other commands."""
    cluster_records.find(name)
    with cluster_records.locked(name):
        deployment = cluster_records.find(name)
        deployment.check_here(_forget(deployment))
        yield deployment


def _forget(deployment: Deployment) -> str:
    return f"if that machine will not come back, forget the cluster: rm -r {shlex.quote(str(deployment.folder))}"


def _provider(backend: str) -> Provider:
    return cast(Provider, plugin_names.provider_class(backend)())


def _encrypts(provider: Provider, backend: str, wanted: bool | None) -> bool:
    """Return whether to make a certificate: as requested, or the backend's default. Some backends make their own."""
    usual: bool | None = getattr(provider, "tls", None)
    if usual is None and wanted is not None:
        raise UsageError(f"backend {backend} has its own encryption: leave --tls and --no-tls out")
    return bool(usual if wanted is None else wanted)
