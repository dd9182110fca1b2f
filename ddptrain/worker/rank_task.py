"""The Dask task for the ranks of one attempt on one worker: starts them, and sends the driver news of them.

    specs arrive (driver_calls.give_specs) -> rank 0's store -> ranks start -> news at intervals -> the last has ended

One task and one thread serve all ranks of the worker, and one message has the news of all of them: separate tasks and
messages would overload the scheduler and the driver from some hundred ranks on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from distributed import Worker, get_worker

from ddptrain.file_ops import open_append
from ddptrain.gpus import usable_cores
from ddptrain.log import Log, as_text
from ddptrain.protocol import deadlines, news
from ddptrain.protocol.news import LogLine, News, RankExit, RankNews
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.worker import rank_environment, spool, stack_reports
from ddptrain.worker.rank_environment import HostResources
from ddptrain.worker.rank_host import RankHost, offered_slots, rank_host
from ddptrain.worker.system_metrics import MemoryWatch, SampledRank, SystemSampler, cpu_seconds, members

_INTERVAL_S = 0.05  # between two messages, while ranks write
_IDLE_S = 0.1  # between two looks at ranks that write nothing: each takes some microseconds of their CPU time
_LONGEST_S = 1.0  # less than the driver waits, after a victim's fault, for its cause (deadlines.VICTIM_SETTLE_S)
_S_PER_RANK = 0.001  # times the world size: with 1,024 ranks, each host sends a message every second
_DATA_BYTES = 12 * 1024  # the most bytes of a rank in a message
_RATE_BYTES_PER_S = 1 << 20  # per rank through the scheduler; the driver fetches the rest from the spool
# The signals of which faulthandler writes the stacks into the log.
_CRASHES = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGFPE, -signal.SIGBUS, -signal.SIGILL}
_log = Log("ddptrain.worker")


def topic(run_id: str) -> str:
    """Return the Dask topic of the news of a run."""
    return f"ddptrain/{run_id}"


@dataclass(frozen=True, slots=True)
class Order:
    """What the Dask task of a worker has: which ranks it runs. Their specs were sent before. port: of their store."""

    run_id: str
    attempt: int
    ranks: Sequence[int]
    port: int


def run_ranks(order: Order) -> None:
    """Run ranks of one attempt until all have ended; the news say how each ends.

    Raises RankServerLost or ClusterError if no rank can be started.
    """
    worker = get_worker()
    host = rank_host(worker, order.run_id)
    texts = host.take_specs(order.run_id, order.attempt)
    specs = [RankSpec.from_json(texts[rank]) for rank in order.ranks]
    RanksTask(worker, host, [spec.with_port(order.port) if order.port else spec for spec in specs]).run()


class RanksTask:
    """The ranks of an attempt on one worker, from the first start to the last exit."""

    def __init__(self, worker: Worker, host: RankHost, specs: Sequence[RankSpec]) -> None:
        self.worker, self.host = worker, host
        self.first, self.key = specs[0], specs[0].key
        self.lines: list[LogLine] = []  # what the driver has to log
        self.ranks = [_Rank(host, spec, self.lines) for spec in specs]
        self.woken = threading.Event()
        self.alive_s = deadlines.alive_s(self.first.config.failure)
        self.sampler = SystemSampler(self._sampled, self.alive_s)
        self.leaving_sent = False

    def run(self) -> list[RankExit | Exception]:
        """Run them; return how each has ended, or the error that prevented it."""
        for rank in self.ranks:  # first, because Dask may release the key at any time
            self.host.register(self.key, rank.spec.key, rank.spec.config.failure.grace_s)
        self.host.wait_for_slots(self.key)
        port = self._store_port()
        uploaded = tuple(entry for entry in sys.path if entry.startswith(self.worker.local_directory))
        resources = HostResources(usable_cores(), offered_slots(self.worker)[0], self.host.interface, uploaded)
        broken = [part for rank in self.ranks for part in rank.start(port, resources, self.woken)]
        for rank in self.ranks:
            self.host.stop_if_told(rank.spec.key)
        if self.host.is_released(self.key):  # Dask has released the key in the meantime
            for rank in self.ranks:
                self.host.kill(rank.spec.key)
        self._send(News(self.first.attempt), broken)
        self.sampler.start()
        try:
            self._watch()
        finally:
            self.sampler.stop()
        return [rank.ended for rank in self.ranks if rank.ended is not None]

    def _store_port(self) -> int:
        """Return the port of the TCPStore. The task of rank 0 starts the store, unless the client has started it."""
        if self.first.rank != 0 or self.first.group.master_port:
            return self.first.group.master_port
        port = self.host.open_store(self.first.key, self.first.group.master_addr)
        self.ranks[0].log("rendezvous store opened", address=f"{self.first.group.master_addr}:{port}")
        self._send(News(self.first.attempt, store_port=port))
        return port

    def _watch(self) -> None:
        """Send what is new until all ranks have ended, and the CPU time of each now and then, as a sign of life.

        The ranks' files are looked at in intervals; a start or an exit is handled at once.
        """
        interval_s = min(_LONGEST_S, max(_INTERVAL_S, self.first.placement.world_size * _S_PER_RANK))
        look_at = measured_at = time.monotonic()
        pause_s = interval_s
        while running := [rank for rank in self.ranks if rank.ended is None]:
            now = time.monotonic()
            parts = [part for rank in running for part in rank.news(looks=now >= look_at)]
            if now >= look_at:
                pause_s = interval_s if parts else max(interval_s, min(2 * pause_s, _IDLE_S))
                look_at = now + min(pause_s, self.alive_s)
            if now - measured_at >= self.alive_s:
                measured_at = now
                parts += self._measured(running)
            message = News(self.first.attempt)
            if self.host.leaving and not self.leaving_sent:
                self.leaving_sent = True
                self.ranks[0].log("worker was asked to end: the driver is asked to preempt the run")
                message = News(self.first.attempt, leaving=True)
            while not self.sampler.errors.empty():
                self.ranks[0].log("system metrics not measured", error=self.sampler.errors.get())
            if parts or self.lines or message.leaving:
                self._send(message, parts)
            while not self.sampler.samples.empty():
                self._send(News(self.first.attempt, sample=self.sampler.samples.get()))
            if any(rank.ended is None for rank in running):
                self.woken.wait(max(0.0, look_at - time.monotonic()))
                self.woken.clear()

    def _sampled(self) -> list[SampledRank]:
        running = [rank for rank in self.ranks if rank.ended is None]
        return [SampledRank(rank.spec.rank, rank.pid, rank.gpu) for rank in running if rank.pid is not None]

    def _measured(self, running: Sequence[_Rank]) -> list[RankNews]:
        """Return the CPU time of each rank and the use of its GPU, which show the driver that silent ranks work."""
        sampled = self._sampled()
        pids = members(rank.pid for rank in sampled)
        cpu_s = {rank.rank: cpu_seconds(pids[rank.pid]) for rank in sampled}
        return [
            dataclasses.replace(
                rank.known, cpu_s=cpu_s.get(rank.spec.rank, 0.0), gpu_percent=self.sampler.gpu_percent(rank.gpu)
            )
            for rank in running
            if rank.ended is None
        ]

    def _send(self, message: News, parts: Iterable[RankNews] = ()) -> None:
        """Send a message with these parts; before it others, if it would become too large."""
        batch: list[RankNews] = []
        size = 0
        for part in parts:
            if size + part.size_bytes > news.MAX_DATA_BYTES:
                self._post(News(message.attempt, tuple(batch)))
                batch, size = [], 0
            batch.append(part)
            size += part.size_bytes
        self._post(dataclasses.replace(message, ranks=tuple(batch), log=tuple(self.lines)))
        self.lines.clear()

    def _post(self, message: News) -> None:
        self.worker.log_event(topic(self.first.run_id), news.encode(message))


class _Rank:
    """One rank from its start to its exit.

    `ended` is None while it runs, then its exit, or the error that prevented it.
    """

    def __init__(self, host: RankHost, spec: RankSpec, lines: list[LogLine]) -> None:
        self.host = host
        self.server = host.server_of(spec.key)  # this one until the end, even if the host replaces it
        self.spec, self.key, self.lines = spec, spec.key, lines
        self.spool = spool.rank_spool(host.scratch, spec.run_id, spec.attempt, spec.rank)
        self.gpu = host.gpu_of(spec.placement.slot) if spec.placement.use_gpu else None
        self.pid: int | None = None
        self.ended: RankExit | Exception | None = None
        self._sent = {"log": 0, "events": 0}  # sizes in bytes that the driver knows
        self._looked_at = time.monotonic()
        self._memory: MemoryWatch | None = None  # set when the process has started

    def start(self, port: int, resources: HostResources, woken: threading.Event) -> list[RankNews]:
        """Request the rank; `woken` is set when it starts or ends. Return the news if it cannot be started."""
        try:
            self.spool.create()
            spec = self._completed(port, resources)
            log_fd, events_fd = open_append(self.spool.log), open_append(self.spool.events)
            slot = self.host.slot_name(spec.placement.slot)
            try:
                self.server.start_rank(self.key, spec.to_json(), log_fd, events_fd, slot, woken)
            finally:
                os.close(log_fd)
                os.close(events_fd)
        except Exception as error:  # of one rank's files or process; the other ranks continue
            return self._given_up(error)
        return []

    def _completed(self, port: int, resources: HostResources) -> RankSpec:
        spec = self.spec if self.spec.group.master_port else self.spec.with_port(port)
        if not os.path.isdir(spec.code.workdir):  # the driver's working directory does not exist on this host
            spec = dataclasses.replace(spec, code=dataclasses.replace(spec.code, workdir=str(self.spool.folder)))
        gpu, staging = self.host.gpu_of(spec.placement.slot), str(self.spool.staging)
        return rank_environment.complete(spec, self.host.environ, resources, gpu, staging)

    def log(self, message: str, /, **fields: object) -> None:
        """Log a decision, here and in the driver."""
        _log.info(message, run=self.spec.run_id, attempt=self.spec.attempt, rank=self.spec.rank, **fields)
        self.lines.append(LogLine(self.spec.rank, as_text(message, **fields)[:4_000]))

    @property
    def known(self) -> RankNews:
        """What the driver knows already."""
        return RankNews(self.spec.rank, self._sent["log"], self._sent["events"])

    def news(self, *, looks: bool) -> list[RankNews]:
        """Return what is new: that the rank has ended and, if it `looks` at them, the growth of its files."""
        try:
            return self._news(looks)
        except Exception as error:
            return self._given_up(error)

    def _news(self, looks: bool) -> list[RankNews]:
        if self.pid is None and (started := self.server.start_of(self.key)) is not None:
            self.pid, how = started
            self._memory, slot = MemoryWatch(self.pid), self.spec.placement.slot
            self.log("rank started", pid=self.pid, start=how, slot=slot, gpu=self.gpu, spool=self.spool.folder)
        if (report := self.server.exit_of(self.key)) is not None:
            return self._end(report)
        return self._growth() if looks else []

    def _growth(self) -> list[RankNews]:
        """Return the new sizes, for a driver that does not see the files also bytes up to the rate limit."""
        since_s, self._looked_at = time.monotonic() - self._looked_at, time.monotonic()
        log_size, events_size = self.spool.sizes()
        sizes = {"log": log_size, "events": events_size}
        if sizes == self._sent:
            return []
        parts = []
        budget = max(_DATA_BYTES, int(_RATE_BYTES_PER_S * min(_LONGEST_S, since_s)))
        for stream, path in (("events", self.spool.events), ("log", self.spool.log)):
            end = min(sizes[stream], self._sent[stream] + budget) if not self.spec.placement.shared else 0
            while (offset := self._sent[stream]) < end:
                if not (data := spool.read_chunk(path, offset, min(_DATA_BYTES, end - offset))):
                    break  # the rank itself has made it shorter
                self._sent[stream] = offset + len(data)
                known = self._sent["log"], self._sent["events"]
                parts.append(RankNews(self.spec.rank, *known, **{stream: data}))  # type: ignore[arg-type]
        if sizes != self._sent:
            self._sent = sizes
            parts.append(RankNews(self.spec.rank, log_size, events_size))
        return parts

    def _end(self, report: dict[str, Any]) -> list[RankNews]:
        with contextlib.suppress(OSError):  # a full disk, or a limit on the size of files: the exit is still reported
            stack_reports.announce_flight_record(self.spool, self.spec)
            stack_reports.report_error_file(self.spool, report["status"])
        parts = self._growth()
        self.ended = ended = self._exit(report)
        self.log("rank ended", pid=ended.pid, status=ended.status, reason=ended.reason or None)
        return [*parts, dataclasses.replace(self.known, ended=ended)]

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
        process = report["pid"], report["status"], report["time_ns"]
        return RankExit(*process, reason, timed_out, lost_peer)

    def _given_up(self, error: Exception) -> list[RankNews]:
        """Note that the rank could not be started, or its rank server has ended; no further news will follow."""
        self.ended = error
        return [RankNews(self.spec.rank, broken=(str(error) or repr(error))[:4_000])]
