"""The Dask task for the ranks of one attempt on one worker: starts them, and reports their output to the driver.

One task and one thread serve all ranks of the worker, and one message contains the notices of several ranks: separate
tasks and messages would overload the scheduler and the driver from some hundred ranks on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distributed import Worker, get_worker

from ddptrain import log
from ddptrain.file_ops import open_append
from ddptrain.gpus import usable_cores
from ddptrain.protocol import events, worker_notices
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.protocol.worker_notices import Notice, RankExit, SystemSample
from ddptrain.worker import rank_environment, spool, stack_reports
from ddptrain.worker.foreign_worker import offered_slots, rank_host
from ddptrain.worker.process_monitor import MemoryWatch, ProcessMonitor
from ddptrain.worker.rank_environment import HostResources, RankResources
from ddptrain.worker.rank_host import RankHost
from ddptrain.worker.system_metrics import SYSTEM_EVERY_S, GpuReader, SampledRank

_POLL_S = 0.02  # between two checks of the files of ranks that print
_IDLE_POLL_S = 0.1  # for ranks that print nothing: each check takes some microseconds of their CPU time
_POLL_S_PER_RANK = 0.0001  # times the world size: with 1,024 ranks, each host sends messages every 0.1 s


def topic(run_id: str) -> str:
    """Return the Dask topic of a run's notices."""
    return f"ddptrain/{run_id}"


@dataclass(frozen=True, slots=True)
class Order:
    """What the Dask task of a worker has: which ranks it runs. Their specs were sent before. port: of their store."""

    run_id: str
    attempt: int
    ranks: Sequence[int]
    port: int


def run_ranks(order: Order) -> None:
    """Run ranks of one attempt until all have ended; notices report how each rank ends.

    Raises RankServerLost or ClusterError if no rank can be started.
    """
    host = rank_host(get_worker(), order.run_id)
    texts = host.take_specs(order.run_id, order.attempt)
    specs = [RankSpec.from_json(texts[rank]) for rank in order.ranks]
    _run([spec.with_port(order.port) if order.port else spec for spec in specs])


def run_rank(spec_json: str) -> str:
    """Run one rank until it has ended; return its RankExit as JSON.

    Raises RankServerLost if the rank could not be started, or its server died.
    """
    (result,) = _run([RankSpec.from_json(spec_json)])
    if isinstance(result, Exception):
        raise result
    return worker_notices.exit_to_json(result)


def _run(specs: Sequence[RankSpec]) -> list[RankExit | Exception]:
    worker = get_worker()
    return _RanksTask(worker, rank_host(worker, specs[0].run_id), specs).run()


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


# --- one rank from its start to its exit ---


# The signals of which faulthandler writes the stacks into the log.
_CRASHES = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGFPE, -signal.SIGBUS, -signal.SIGILL}
_NUMBERS_S_PER_RANK = 0.001  # times the world size: between two notices of a rank that only logs numbers
_MAX_NUMBERS_S = 2.0  # the limit of that time
_OUTPUT_BYTES = 12 * 1024  # the most bytes in a notice: the scheduler keeps the last thousand messages of a topic
_RATE_BYTES_PER_S = 1 << 20  # per rank through the scheduler; the driver fetches the rest from the spool


_gpus = GpuReader()


class RankWatch:
    """One rank from its start to its exit.

    `ended` is None while it runs, then its exit, or the error that prevented it.
    """

    def __init__(self, host: RankHost, spec: RankSpec, send: Callable[[Notice], None], logged: log.RunLog) -> None:
        self.host = host
        self.server = host.server  # this one until the end, even if the host replaces its server
        self.spec = spec
        self.spool = spool.rank_spool(host.scratch, spec.run_id, spec.attempt, spec.rank)
        self.ended: RankExit | Exception | None = None
        self.send_sample: Callable[[SystemSample], None] = send  # from the sampler's thread
        self._send = send
        self._sent = {"log": 0, "events": 0}  # sizes in bytes that the driver knows
        self._notified_at = self._looked_at = time.monotonic()
        self._process: ProcessMonitor | None = None  # these two are set when the process has started
        self._memory: MemoryWatch | None = None
        self._numbers_s = min(spec.placement.world_size * _NUMBERS_S_PER_RANK, _MAX_NUMBERS_S)
        self.log = logged

    def start(self, port: int, resources: HostResources, woken: threading.Event) -> None:
        """Request the rank; `woken` is set when it starts or ends. Raises RankServerLost, OSError."""
        self.spool.create()
        spec = self._completed(port, resources)
        log_fd, events_fd = open_append(self.spool.log), open_append(self.spool.events)
        slot = self.host.slot_name(spec.placement.slot)
        try:
            self.server.start_rank(spec.key, spec.to_json(), log_fd, events_fd, slot, woken)
        finally:
            os.close(log_fd)
            os.close(events_fd)

    def _completed(self, port: int, resources: HostResources) -> RankSpec:
        """Return the spec with the values that the worker adds."""
        spec = self.spec if self.spec.group.master_port else self.spec.with_port(port)
        if not os.path.isdir(spec.code.workdir):  # the driver's working directory does not exist on this host
            spec = dataclasses.replace(spec, code=dataclasses.replace(spec.code, workdir=str(self.spool.folder)))
        gpu = self.host.gpu_of(spec.placement.slot)
        rank_resources = RankResources(gpu, resources, str(self.spool.staging))
        return rank_environment.complete(spec, self.host.environ, rank_resources)

    def report_news(self) -> bool:
        """Send notices about everything new.

        Return whether the rank's files have grown. Raises RankServerLost, OSError.
        """
        report = self.server.wait_exit(self.spec.key, 0)
        self._log_start()
        if report is not None:
            self._end(report)
            return True
        grew = self._send_growth()
        self._measure()
        if time.monotonic() - self._notified_at > self.spec.supervision.alive_s:
            self._notify(self._alive())
        return grew

    def _end(self, report: dict[str, Any]) -> None:
        self._numbers_s = 0.0
        with contextlib.suppress(OSError):  # a full disk, or a limit on the size of files: the exit is still reported
            stack_reports.announce_flight_record(self.spool, self.spec)
            stack_reports.report_error_file(self.spool, report["status"])
        self._send_growth()
        rank_exit = self._exit(report)
        self.log.info("rank ended", pid=rank_exit.pid, status=rank_exit.status, reason=rank_exit.reason or None)
        self._notify(rank_exit)
        self.ended = rank_exit

    def give_up(self, error: Exception) -> None:
        """Report that the rank could not be started, or its rank server has ended; no further notices will follow."""
        self.ended = error
        self._notify(worker_notices.Broken(self.spec.attempt, self.spec.rank, (str(error) or repr(error))[:4_000]))

    def _log_start(self) -> None:
        if (started := self.server.start_of(self.spec.key)) is not None:
            pid, how = started
            slot = self.spec.placement.slot
            gpu = self.host.gpu_of(slot)
            self.log.info("rank started", pid=pid, start=how, slot=slot, gpu=gpu, spool=self.spool.folder)

    def _alive(self) -> worker_notices.Alive:
        """Return a notice with the CPU time that the rank has used, and the use of its GPU if it is known."""
        cpu_s = self._process.cpu_s() if self._process is not None else 0.0
        gpu = self.host.gpu_of(self.spec.placement.slot) if self.spec.placement.use_gpu else None
        percent = _gpus.percent(gpu) if gpu else None
        return worker_notices.Alive(self.spec.attempt, self.spec.rank, cpu_s, percent)

    def _measure(self) -> None:
        """Start all measurements when the rank's process has started."""
        if self._process is not None or (pid := self.server.pid_of(self.spec.key)) is None:
            return
        self._process, self._memory = ProcessMonitor(pid), MemoryWatch(pid)
        spec = self.spec
        gpu = self.host.gpu_of(spec.placement.slot) if spec.placement.use_gpu else None
        rank = spec.run_id, spec.attempt, spec.rank
        self.host.sampler.add(spec.key, SampledRank(*rank, pid, gpu, SYSTEM_EVERY_S, self.send_sample))

    def _exit(self, report: dict[str, Any]) -> RankExit:
        """Return the exit that the rank server has reported, with its reason if it is known."""
        reason, timed_out, lost_peer = "", False, False
        if report["status"] == -signal.SIGKILL and self._memory is not None:
            reason = self._memory.explain_kill()
        elif report["status"] in _CRASHES:
            place = stack_reports.crash_place(self.spool)
            reason = ", ".join(filter(None, (stack_reports.why_aborted(self.spool), place)))
            if report["status"] == -signal.SIGABRT:
                timed_out, lost_peer = stack_reports.waited_for_peer(self.spool)
        elif report["status"] > 0:
            reason = self.spool.why_unwritable()
        sizes = self.spool.sizes()
        process = report["pid"], report["status"], report["time_ns"]
        return RankExit(self.spec.attempt, self.spec.rank, *process, *sizes, reason, timed_out, lost_peer)

    def _send_growth(self) -> bool:
        """Report the sizes of the log and the events file. Return whether they have grown."""
        since_s, self._looked_at = time.monotonic() - self._looked_at, time.monotonic()
        log_size, events_size = self.spool.sizes()
        sizes = {"log": log_size, "events": events_size}
        if sizes == self._sent:
            return False
        if time.monotonic() - self._notified_at < self._numbers_s and self._has_only_numbers(events_size):
            return True
        if not self.spec.placement.shared:
            self._send_output(sizes, since_s)
        self._notify(worker_notices.Growth(self.spec.attempt, self.spec.rank, log_size, events_size))
        self._sent = sizes
        return True

    def _has_only_numbers(self, events_size: int) -> bool:
        """Return whether all new events are metrics or progress, which may reach the driver later."""
        sent = self._sent["events"]
        if events_size - sent > _OUTPUT_BYTES:
            return False
        return events.are_numbers(spool.read_chunk(self.spool.events, sent, events_size - sent))

    def _send_output(self, sizes: dict[str, int], since_s: float) -> None:
        """Send new bytes of log and events up to the rate limit. The driver fetches the rest."""
        budget = max(_OUTPUT_BYTES, int(_RATE_BYTES_PER_S * min(1.0, since_s)))
        for stream, path in (("events", self.spool.events), ("log", self.spool.log)):
            offset = self._sent[stream]
            end = min(sizes[stream], offset + budget)
            while offset < end:
                data = spool.read_chunk(path, offset, min(_OUTPUT_BYTES, end - offset))
                self._notify(worker_notices.OutputBytes(self.spec.attempt, self.spec.rank, stream, offset, data))
                offset += len(data)

    def _notify(self, notice: Notice) -> None:
        self._send(notice)
        self._notified_at = time.monotonic()
