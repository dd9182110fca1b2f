"""The Dask task of a rank: starts the rank on its worker, reports its growth to the driver, and returns its exit."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from typing import Any

from dask.system import cpu_count
from distributed import Worker, get_worker

from ddptrain import log
from ddptrain.file_ops import open_append
from ddptrain.protocol import worker_notices
from ddptrain.protocol.encryption import decrypt_spec
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.protocol.worker_notices import RankExit
from ddptrain.worker import environment, spool, stack_reports
from ddptrain.worker.foreign_worker import rank_host
from ddptrain.worker.gpu_use import gpu_percent
from ddptrain.worker.oom import MemoryWatch
from ddptrain.worker.process_monitor import ProcessMonitor
from ddptrain.worker.rank_host import RankHost
from ddptrain.worker.system.sampler import SampledRank

_POLL_S = 0.02  # between two checks of the files of a rank that prints
_IDLE_POLL_S = 0.1  # of a rank that prints nothing: each check takes some microseconds of its CPU time
_MEMORY_S = 1.0  # between two checks of the memory
_OUTPUT_BYTES = 12 * 1024  # of log or events in one notice: the scheduler keeps the last thousand of a topic
_RATE_BYTES_PER_S = 1 << 20  # per rank through the scheduler; the driver fetches the rest from the spool


def topic(run_id: str) -> str:
    """The Dask topic of a run's notices."""
    return f"ddptrain/{run_id}"


def run_rank(spec_json: str) -> str:
    """Run a rank. Returns its RankExit as JSON when it has ended.

    Raises:
        RankServerLost: the rank could not be started, or its server died.
        ClusterError: the spec's secrets were encrypted for another worker.
    """
    spec = RankSpec.from_json(spec_json)
    worker = get_worker()
    host = rank_host(worker, spec.run_id)
    return _RankTask(worker, host, decrypt_spec(spec, host.opener)).run()


class _RankTask:
    """One rank from its start to its exit, as seen by its worker."""

    def __init__(self, worker: Worker, host: RankHost, spec: RankSpec) -> None:
        self.worker = worker
        self.host = host
        self.server = host.server  # kept until the end, even if the host replaces it
        self.spec = spec
        self.spool = spool.rank_spool(host.scratch, spec.run_id, spec.attempt, spec.rank)
        self.sent = {"log": 0, "events": 0}  # sizes in bytes that the driver knows
        self.notified_at = time.monotonic()
        self.process: ProcessMonitor | None = None  # these two are set when the process has started
        self.memory: MemoryWatch | None = None
        self.checked_at = 0.0
        fields = {"attempt": spec.attempt, "rank": spec.rank, "worker": worker.address}
        self.log = log.RunLog("ddptrain.worker", worker.log_event, spec.run_id, **fields)

    def run(self) -> str:
        self.spool.create()
        spec = self._completed()
        self.host.register(spec.key, spec.key, spec.supervision.grace_s)
        log_fd, events_fd = open_append(self.spool.log), open_append(self.spool.events)
        slot = self.host.slot_name(spec.placement.slot)
        try:
            self.server.start_rank(spec.key, spec.to_json(), log_fd, events_fd, slot)
        finally:
            os.close(log_fd)
            os.close(events_fd)
        if self.host.is_released(spec.key):  # Dask has released the key in the meantime
            self.host.kill(spec.key)
        try:
            return self._watch()
        finally:
            self.host.sampler.remove(spec.key)

    def _completed(self) -> RankSpec:
        """The spec with everything that the worker adds."""
        spec = self._with_store()
        if not os.path.isdir(spec.code.workdir):  # the driver's working directory does not exist on this host
            spec = dataclasses.replace(spec, code=dataclasses.replace(spec.code, workdir=str(self.spool.folder)))
        gpu = self.host.gpu_of(spec.placement.slot)
        resources = environment.RankResources(gpu, cpu_count(), self.host.interface, str(self.spool.staging))
        return environment.complete(spec, self.host.environ, resources)

    def _with_store(self) -> RankSpec:
        """The spec with the store's port. The task of rank 0 starts the store, unless the client already has."""
        if self.spec.rank != 0 or self.spec.group.master_port:
            return self.spec
        port = self.host.open_store(self.spec.key, self.spec.group.master_addr)
        self.log.info("rendezvous store opened", address=f"{self.spec.group.master_addr}:{port}")
        self._notify(worker_notices.StoreOpened(self.spec.attempt, self.spec.rank, port))
        return self.spec.with_port(port)

    def _watch(self) -> str:
        pause_s = _POLL_S
        leaving_sent = False
        while (report := self.server.wait_exit(self.spec.key, pause_s)) is None:
            self._log_start()
            pause_s = _POLL_S if self._send_growth() else min(2 * pause_s, _IDLE_POLL_S)
            if self.host.leaving and not leaving_sent:
                leaving_sent = True
                self.log.info("worker was told to end: the driver is asked to preempt the run")
                self._notify(worker_notices.Leaving(self.spec.attempt, self.spec.rank))
            self._check_process()
            if time.monotonic() - self.notified_at > self.spec.supervision.alive_s:
                self._notify(self._alive())
        self._log_start()
        stack_reports.announce_flight_record(self.spool, self.spec)
        stack_reports.report_error_file(self.spool, report["status"])
        self._send_growth()
        rank_exit = self._exit(report)
        self.log.info("rank ended", pid=rank_exit.pid, status=rank_exit.status, oom=rank_exit.oom or None)
        self._notify(rank_exit)
        return worker_notices.exit_to_json(rank_exit)

    def _log_start(self) -> None:
        if (started := self.server.start_of(self.spec.key)) is not None:
            pid, how = started
            slot = self.spec.placement.slot
            gpu = self.host.gpu_of(slot)
            self.log.info("rank started", pid=pid, start=how, slot=slot, gpu=gpu, spool=self.spool.folder)

    def _alive(self) -> worker_notices.Alive:
        """The CPU time that the rank has used, and the use of its GPU if that is known."""
        cpu_s = self.process.cpu_s() if self.process is not None else 0.0
        gpu = self.host.gpu_of(self.spec.placement.slot) if self.spec.placement.use_gpu else None
        percent = gpu_percent(gpu) if gpu else None
        return worker_notices.Alive(self.spec.attempt, self.spec.rank, cpu_s, percent)

    def _check_process(self) -> None:
        """Check the memory now and then, because after a kill it can no longer be measured."""
        if time.monotonic() - self.checked_at < _MEMORY_S:
            return
        if self.memory is not None:
            self.memory.update()
        elif (pid := self.server.pid_of(self.spec.key)) is not None:
            self.process, self.memory = ProcessMonitor(pid), MemoryWatch(pid)
            self._sample(pid)
        else:
            return
        self.checked_at = time.monotonic()

    def _sample(self, pid: int) -> None:
        """Have the host's sampler measure this rank, too."""
        spec = self.spec
        if not spec.supervision.system_every_s:
            return
        gpu = self.host.gpu_of(spec.placement.slot) if spec.placement.use_gpu else None
        rank = spec.run_id, spec.attempt, spec.rank
        send_to = topic(spec.run_id)
        self.host.sampler.add(
            spec.key,
            SampledRank(
                *rank,
                pid,
                gpu,
                spec.supervision.system_every_s,
                lambda sample: self.worker.log_event(send_to, worker_notices.encode(sample)),
            ),
        )

    def _exit(self, report: dict[str, Any]) -> RankExit:
        """The exit that the rank server has reported, with the reason for a signal."""
        oom, timed_out = "", False
        if report["status"] == -signal.SIGKILL and self.memory is not None:
            oom = self.memory.explain_kill()
        elif report["status"] == -signal.SIGABRT:
            timed_out = stack_reports.timed_out(self.spool)
        sizes = self.spool.sizes()
        process = report["pid"], report["status"], report["time_ns"]
        return RankExit(self.spec.attempt, self.spec.rank, *process, *sizes, oom=oom, timed_out=timed_out)

    def _send_growth(self) -> bool:
        """Report the sizes of the log and the events. Returns whether they have grown."""
        sizes = dict(zip(("log", "events"), self.spool.sizes(), strict=True))
        if sizes == self.sent:
            return False
        if not self.spec.placement.shared:
            self._send_output(sizes)
        self._notify(worker_notices.Growth(self.spec.attempt, self.spec.rank, sizes["log"], sizes["events"]))
        self.sent = sizes
        return True

    def _send_output(self, sizes: dict[str, int]) -> None:
        """Send new bytes up to the rate limit. The driver fetches the rest."""
        budget = int(_RATE_BYTES_PER_S * _POLL_S)
        for stream, path in (("events", self.spool.events), ("log", self.spool.log)):
            offset = self.sent[stream]
            end = min(sizes[stream], offset + budget)
            while offset < end:
                data = spool.read_chunk(path, offset, min(_OUTPUT_BYTES, end - offset))
                self._notify(worker_notices.OutputBytes(self.spec.attempt, self.spec.rank, stream, offset, data))
                offset += len(data)

    def _notify(self, notice: worker_notices.Notice) -> None:
        self.worker.log_event(topic(self.spec.run_id), worker_notices.encode(notice))
        self.notified_at = time.monotonic()
