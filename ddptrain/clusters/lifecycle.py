"""Clusters that outlive the command that starts them: up, logs, down."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shlex
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self, cast

from ddptrain.clusters import record as records
from ddptrain.clusters import resolve, status
from ddptrain.clusters.provider import Backend, Tell
from ddptrain.clusters.record import ClusterRecord
from ddptrain.clusters.security import make_tls
from ddptrain.clusters.signals import deferred
from ddptrain.clusters.status import State, View, WorkerView
from ddptrain.config import plugin_names
from ddptrain.config.wording import counted, did_you_mean, shorten
from ddptrain.errors import ClusterError, DdptrainError, UsageError
from ddptrain.log import Log

if TYPE_CHECKING:
    from distributed import Client

    from ddptrain.config.sections.clusters import ClusterConfig

_log = Log(__name__)
_SURE_S = 10.0  # a cluster that does not answer for that long has failed, and is cleaned up
_END_S = 60.0  # another command may need that long to clean up a failed start
_NOT_OF_THE_CLUSTER = frozenset({"name", "start_timeout_s", "wait_s"})
_POLL_S = 0.02
_WARM_ROUND_S = 1.0  # seconds that one check waits for the workers to become warm
_FAULT_EVERY_S = 2.0  # seconds; each check costs a call to the batch system or the remote host
_LAST_LOOK_S = 1.0  # for workers that joined while others were still being started
_LOG_LINES = 12
_CLOSE_S = 2.0  # for closing the connection


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
        raise UsageError(f"the cluster {name} is up at {view.cluster.address}, {view.slots} slots")
    _check_same(view, config)
    tell(f"the cluster {name} is up already")
    return view


def _start(config: ClusterConfig, name: str, backend: Backend, tell: Tell) -> View:
    began = time.monotonic()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    cluster = records.create(ClusterRecord(name=name, config=config, started_at=now))
    _log.info("cluster starts", cluster=name, backend=config.backend, folder=cluster.folder)
    try:
        if backend.tls:
            make_tls(cluster.folder)
        # The generator is closed before the clean-up: it waits for what it is starting at the moment.
        with deferred(breakable=True) as deliver_signals, contextlib.closing(backend.start(cluster, tell)) as parts:
            for part in parts:
                cluster.keep(part)
                deliver_signals()
        with _Wait(cluster, backend, tell, began) as wait:
            view = wait.until_ready(config.ranks if isinstance(config.ranks, int) else None)
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
    _log.info("cluster is up", cluster=name, address=cluster.address, slots=view.slots, took_s=took_s)
    if cluster.address.startswith("tcp://"):
        tell(
            f"warning: the scheduler at {cluster.address} asks for no certificate: everyone who can reach it can run "
            "programs as you on its workers"
        )
    return view


def _look_or_clean_up(name: str, tell: Tell) -> View | None:
    """Return the cluster if it is up; otherwise end its remaining processes.

    Raises UsageError if it is uncertain whether the cluster is up; ClusterError.
    """
    try:
        cluster = records.find(name)
    except records.ClusterNotFound:
        return None
    cluster.check_here(f"or choose another --name; {_forget(cluster)}")
    resolve.reopen(cluster)
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
    cluster, name = view.cluster, view.name
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


class _Wait:
    """The wait for the workers of a cluster, for `cluster.start_timeout_s` from `began` (monotonic seconds)."""

    def __init__(self, cluster: ClusterRecord, backend: Backend, tell: Tell, began: float) -> None:
        with deferred():  # an interrupted import leaves a broken module, which the clean-up may need
            import distributed  # noqa: F401 - here, while the processes start
        self.cluster, self.backend, self.tell = cluster, backend, tell
        self.timeout_s = cluster.config.start_timeout_s
        self.deadline = max(began + self.timeout_s, time.monotonic() + _LAST_LOOK_S)
        self._client: Client | None = None
        self._asked_fault_at = time.monotonic()
        self._shown: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.close(timeout=_CLOSE_S)

    def until_ready(self, asked: int | None) -> View:
        """Wait until all workers are warm, with `asked` slots (None: any). Raises ClusterError with their logs."""
        expected = max(1, self.cluster.workers)
        while True:
            view = self._view()
            if view.workers:
                self._show(
                    f"{len(view.workers)} of {counted(expected, 'worker')} joined, {counted(view.slots, 'slot')}"
                )
            all_there = len(view.workers) >= expected
            if all_there and view.slots >= (asked or 1):
                if (warm := self._warm(view)) is not None:
                    self.tell("warm")
                    return warm
            elif all_there and self.cluster.workers:
                raise ClusterError(
                    f"{self._came(view, asked)}, and no more workers are starting{self._last_words(view)}"
                )
            self._pause(self._came(view, asked), view)

    def _view(self) -> View:
        """Return the cluster as it is now. Raises ClusterError if its scheduler does not answer in time."""
        address = ""
        try:
            while not self.cluster.read_address().address:
                self._pause("no scheduler has come up")
            address = self.cluster.address
            return status.seen(self.cluster, self._overview())
        except (OSError, TimeoutError) as error:
            raise ClusterError(f"the scheduler at {address} does not answer: {error}{self._last_words()}") from error
        except ImportError as error:  # raised in the process of the scheduler
            raise ClusterError(
                f"the scheduler at {address} can't be used ({error}): install ddptrain on the hosts of the scheduler "
                "and of the workers"
            ) from error

    def _overview(self) -> Mapping[str, Any]:
        """Return the answer of the scheduler. Raises OSError or TimeoutError."""
        from distributed import Client
        from distributed.comm.core import CommClosedError, FatalCommClosedError

        from ddptrain.clusters.scheduler import slots

        logging.getLogger("distributed").setLevel(logging.CRITICAL)  # errors are reported here
        target = resolve.of_cluster(self.cluster)
        self._show(f"scheduler at {target.address}")
        while self._client is None:
            client = None
            timeout_s = max(1.0, self.deadline - time.monotonic())
            try:
                client = Client(
                    target.address,
                    security=target.security,
                    timeout=timeout_s,
                    name="ddptrain-up",
                    set_as_default=False,
                )
                client.run_on_scheduler(slots.overview)
            except OSError as error:  # a forwarded port accepts connections before the scheduler does, and closes them
                closed = isinstance(error, CommClosedError) and not isinstance(error, FatalCommClosedError)
                if client is not None:
                    client.close(timeout=_CLOSE_S)
                elif not closed:
                    raise
                self._pause(f"the scheduler at {target.address} does not answer ({error})")
            else:
                self._client = client
        return cast(Mapping[str, Any], self._client.run_on_scheduler(slots.overview))

    def _warm(self, view: View) -> View | None:
        """Return the view if all workers are warm within 1 s, else None. Raises ClusterError for an unusable worker."""
        from ddptrain.worker import driver_calls

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

    def _pause(self, what: str, view: View | None = None) -> None:
        """Sleep for one poll interval. Raises ClusterError if the time is over or a part of the cluster has failed."""
        now = time.monotonic()
        if now > self.deadline:
            raise ClusterError(f"{what} within {self.timeout_s:g} s{self._last_words(view)}")
        if now - self._asked_fault_at > _FAULT_EVERY_S:
            self._asked_fault_at = now
            if (reason := self.backend.fault(self.cluster)) is not None:
                raise ClusterError(f"{what}: {reason}{self._last_words(view)}")
        time.sleep(_POLL_S)

    def _came(self, view: View, asked: int | None) -> str:
        room: Counter[str] = Counter()
        for worker in view.workers:
            room[_place(worker)] += worker.slots
        sources = f" ({', '.join(f'{count} from {place}' for place, count in room.items())})" if room else ""
        if asked is not None:
            return f"{counted(asked, 'slot')} needed, but only {view.slots} joined{sources}"
        ordered = counted(max(1, self.cluster.workers), "worker")
        return f"{ordered} ordered, {len(view.workers)} joined with {counted(view.slots, 'slot')}{sources}"

    def _last_words(self, view: View | None = None) -> str:
        words = _last_words(self.backend, self.cluster, view)
        return f"\n{words}" if words else ""

    def _show(self, text: str) -> None:
        if text not in self._shown:
            self._shown.add(text)
            self.tell(text)


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
    try:
        records.find(name)
    except records.ClusterNotFound:
        records.remove_remains(name)
        raise
    with records.locked(name):
        cluster = records.find(name)
        cluster.check_here(_forget(cluster))
        view = None if now else status.probe(cluster, _SURE_S)
        if view and view.state == State.UP and not (view.runs or view.waiting):
            with contextlib.suppress(Exception):  # it failed meanwhile, or is of a version without this call
                view = status.refuse_runs(cluster, _SURE_S)
        if view and (runs := [run.run_id for run in (*view.runs, *view.waiting)]):
            raise UsageError(
                f"the cluster {name} is in use by {', '.join(runs)}: wait for the end, or end it all with "
                f"ddptrain cluster down {name} --now"
            )
        _end(cluster, _backend(cluster.backend), tell)


def _end(cluster: ClusterRecord, backend: Backend, tell: Tell) -> None:
    _log.info("cluster ends", cluster=cluster.name)
    with deferred():
        backend.stop(cluster, tell)
        cluster.remove()


def _last_words(backend: Backend, cluster: ClusterRecord, view: View | None = None) -> str:
    """Return the last log lines of the processes that have not joined; without a `view`, of all processes."""
    workers = view.workers if view is not None else ()
    joined = {name for worker in workers for name in (worker.host, worker.name)} | ({"scheduler"} if workers else set())
    quotes = [
        f"last lines of {source}:\n  " + text.strip().replace("\n", "\n  ")
        for source, text in backend.logs(cluster, _LOG_LINES).items()
        if text.strip() and not joined.intersection(source.split())
    ]
    return "\n".join(quotes)


def _place(worker: WorkerView) -> str:
    return worker.host if worker.name in (worker.host, worker.address) else f"{worker.name} ({worker.host})"


def _forget(cluster: ClusterRecord) -> str:
    return f"if that machine will not come back, forget the cluster: rm -r {shlex.quote(str(cluster.folder))}"


def _backend(name: str) -> Backend:
    return cast(Backend, plugin_names.provider_class(name)())
