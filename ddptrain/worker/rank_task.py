"""The Dask task for the ranks of one attempt on one worker: starts them, and reports their output to the driver.

One task and one thread serve all ranks of the worker, and one message contains the notices of several ranks: separate
tasks and messages would overload the scheduler and the driver from some hundred ranks on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from distributed import Worker, get_worker

from ddptrain import log
from ddptrain.gpus import usable_cores
from ddptrain.protocol import worker_notices
from ddptrain.protocol.encryption import decrypt_specs
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.protocol.worker_notices import Notice, RankExit
from ddptrain.worker.foreign_worker import offered_slots, rank_host
from ddptrain.worker.rank_environment import HostResources
from ddptrain.worker.rank_host import RankHost
from ddptrain.worker.rank_watch import RankWatch

_POLL_S = 0.02  # between two checks of the files of ranks that print
_IDLE_POLL_S = 0.1  # for ranks that print nothing: each check takes some microseconds of their CPU time
_POLL_S_PER_RANK = 0.0001  # times the world size: with 1,024 ranks, each host sends messages every 0.1 s


def topic(run_id: str) -> str:
    """Return the Dask topic of a run's notices."""
    return f"ddptrain/{run_id}"


def run_ranks(specs: Sequence[str]) -> None:
    """Run ranks of one attempt until all have ended; notices report how each rank ends.

    Raises RankServerLost or ClusterError if no rank can be started.
    """
    _run(specs)


def run_rank(spec_json: str) -> str:
    """Run one rank until it has ended; return its RankExit as JSON.

    Raises:
        RankServerLost: the rank could not be started, or its server died.
        ClusterError: the spec's secrets were encrypted for another worker.
    """
    (result,) = _run([spec_json])
    if isinstance(result, Exception):
        raise result
    return worker_notices.exit_to_json(result)


def _run(texts: Sequence[str]) -> list[RankExit | Exception]:
    specs = [RankSpec.from_json(text) for text in texts]
    worker = get_worker()
    host = rank_host(worker, specs[0].run_id)
    return _RanksTask(worker, host, decrypt_specs(specs, host.worker_key)).run()


class NoticeBatch:
    """Collects notices and sends them in one message."""

    def __init__(self, send: Callable[[dict[str, object]], object]) -> None:
        self._send = send
        self._notices: list[Notice] = []
        self._size_bytes = 0

    def add(self, notice: Notice) -> None:
        """Add a notice; if the message would become too large, first send the earlier notices."""
        size_bytes = worker_notices.size_bytes(notice)
        if self._size_bytes + size_bytes > worker_notices.MAX_DATA_BYTES:
            self.flush()
        self._notices.append(notice)
        self._size_bytes += size_bytes

    def flush(self) -> None:
        """Send the collected notices, if there are any."""
        if self._notices:
            self._send(worker_notices.encode_all(self._notices))
            self._notices, self._size_bytes = [], 0


class _RanksTask:
    """The ranks of an attempt on one worker, from the first start to the last exit."""

    def __init__(self, worker: Worker, host: RankHost, specs: Sequence[RankSpec]) -> None:
        self.worker = worker
        self.host = host
        self.specs = specs
        self.key = specs[0].key
        run_id = specs[0].run_id
        self.batch = NoticeBatch(lambda message: worker.log_event(topic(run_id), message))
        self.woken = threading.Event()
        self.logs = [_run_log(worker, spec) for spec in specs]
        self.watches = [
            RankWatch(host, spec, self.batch.add, logged) for spec, logged in zip(specs, self.logs, strict=True)
        ]
        send_to = topic(run_id)
        for watch in self.watches:
            watch.send_sample = lambda sample: worker.log_event(send_to, worker_notices.encode(sample))
        self.leaving_sent = False
        self.poll_s = max(_POLL_S, specs[0].placement.world_size * _POLL_S_PER_RANK)

    def run(self) -> list[RankExit | Exception]:
        for spec in self.specs:  # first, because Dask may release the key at any time
            self.host.register(self.key, spec.key, spec.supervision.grace_s)
        port = self._store_port()
        resources = HostResources(usable_cores(), offered_slots(self.worker)[0], self.host.interface)
        for watch in self.watches:
            self._guarded(watch, lambda watch=watch: watch.start(port, resources, self.woken))  # type: ignore[misc]
        for spec in self.specs:
            self.host.stop_if_told(spec.key)
        if self.host.is_released(self.key):  # Dask has released the key in the meantime
            for spec in self.specs:
                self.host.kill(spec.key)
        try:
            self._watch()
        finally:
            for spec in self.specs:
                self.host.sampler.remove(spec.key)
        return [watch.ended for watch in self.watches if watch.ended is not None]

    def _store_port(self) -> int:
        """Return the port of the TCPStore. The task of rank 0 starts the store, unless the client has started it."""
        first = self.specs[0]
        if first.rank != 0 or first.group.master_port:
            return first.group.master_port
        port = self.host.open_store(first.key, first.group.master_addr)
        self.logs[0].info("rendezvous store opened", address=f"{first.group.master_addr}:{port}")
        self.batch.add(worker_notices.StoreOpened(first.attempt, first.rank, port))
        self.batch.flush()
        return port

    def _guarded(self, watch: RankWatch, step: Callable[[], object]) -> bool:
        """Return the result of `step`. If it raises an exception, give up this rank; the other ranks continue."""
        try:
            return bool(step())
        except Exception as error:  # of one rank's files or process; the driver receives it as the rank's fault
            watch.give_up(error)
            return True

    def _watch(self) -> None:
        pause_s = self.poll_s
        while running := [watch for watch in self.watches if watch.ended is None]:
            grew = [self._guarded(watch, watch.report_news) for watch in running]
            self._send_leaving(running[0].spec)
            self.batch.flush()
            pause_s = self.poll_s if any(grew) else min(2 * pause_s, max(_IDLE_POLL_S, self.poll_s))
            if any(watch.ended is None for watch in running):
                self.woken.wait(pause_s)
                self.woken.clear()
        self.batch.flush()

    def _send_leaving(self, spec: RankSpec) -> None:
        if self.host.leaving and not self.leaving_sent:
            self.leaving_sent = True
            self.logs[0].info("worker was asked to end: the driver is asked to preempt the run")
            self.batch.add(worker_notices.Leaving(spec.attempt, spec.rank))


def _run_log(worker: Worker, spec: RankSpec) -> log.RunLog:
    fields = {"attempt": spec.attempt, "rank": spec.rank, "worker": worker.address}
    return log.RunLog("ddptrain.worker", worker.log_event, spec.run_id, **fields)
