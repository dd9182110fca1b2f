"""What the driver has a worker do: run one rank to its end, stop it, and read from its spool."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

from dask.system import cpu_count
from distributed import Worker, get_worker

from ddptrain.errors import ClusterError
from ddptrain.file_ops import open_append
from ddptrain.protocol import commands, notices
from ddptrain.protocol.commands import Command
from ddptrain.protocol.encryption import open_spec
from ddptrain.protocol.notices import RankExit
from ddptrain.protocol.rank_spec import GPU_RESOURCE, RankSpec, key_prefix
from ddptrain.worker import diagnostics, environment, spool
from ddptrain.worker.foreign_worker import attach, offered_slots, rank_host
from ddptrain.worker.gpu_use import gpu_percent
from ddptrain.worker.oom import MemoryWatch
from ddptrain.worker.procfs import ProcessMonitor
from ddptrain.worker.rank_host import RankHost, own_host, slot_resources
from ddptrain.worker.rank_server_client import RankServerLost
from ddptrain.worker.tcp_timeouts import follow

POLL_S = 0.02  # how soon the driver hears that a busy rank has printed something
_IDLE_POLL_S = 0.1  # of one that has been silent for a while: each look costs the training some microseconds
_MEMORY_S = 1.0  # between two looks at how much memory is left
_NOTICE_BYTES = 12 * 1024  # of log or events in one message: the scheduler keeps the last thousand of a topic
_RATE_BYTES_PER_S = 1 << 20  # per rank through the scheduler; what is over it the driver fetches from the spool


def run_rank(spec_json: str) -> str:
    """The Dask task of a rank: start it, report its growth, and return its RankExit as JSON when it has ended.

    Raises:
        RankServerLost: no rank could be started, or its server died.
        ClusterError: its secrets were sealed for another worker.
    """
    spec = RankSpec.from_json(spec_json)
    worker = get_worker()
    host = rank_host(worker, spec.run_id)
    return _RankTask(worker, host, open_spec(spec, host.opener)).run()


def topic(run_id: str) -> str:
    """The Dask topic of a run's notices."""
    return f"ddptrain/{run_id}"


class _RankTask:
    """One rank, from its order to its exit, seen from its worker."""

    def __init__(self, worker: Worker, host: RankHost, spec: RankSpec) -> None:
        self.worker = worker
        self.host = host
        self.server = host.server  # this one, to the end, even if the host gets another one
        self.spec = spec
        self.spool = spool.rank_spool(host.scratch, spec.run_id, spec.attempt, spec.rank)
        self.told = {"log": 0, "events": 0}
        self.told_at = time.monotonic()
        self.process: ProcessMonitor | None = None  # once the process is there, as the next
        self.memory: MemoryWatch | None = None
        self.looked_at = 0.0

    def run(self) -> str:
        self.spool.create()
        spec = self._completed()
        self.host.register(spec.key, spec.key, spec.supervision.grace_s)
        log_fd, events_fd = open_append(self.spool.log), open_append(self.spool.events)
        try:
            self.server.start_rank(
                spec.key, spec.to_json(), log_fd, events_fd, self.host.slot_name(spec.placement.slot)
            )
        finally:
            os.close(log_fd)
            os.close(events_fd)
        if self.host.is_released(spec.key):  # while the rank was being ordered
            self.host.kill(spec.key)
        return self._watch()

    def _completed(self) -> RankSpec:
        spec = self._with_rendezvous()
        if not os.path.isdir(spec.code.workdir):  # the driver's folder, on a host that doesn't have it
            spec = dataclasses.replace(spec, code=dataclasses.replace(spec.code, workdir=str(self.spool.folder)))
        gpu = self.host.gpu_of(spec.placement.slot)
        resources = environment.RankResources(gpu, cpu_count(), self.host.interface, str(self.spool.staging))
        return environment.complete(spec, self.host.environ, resources)

    def _with_rendezvous(self) -> RankSpec:
        """Rank 0's task opens the gang's store and publishes its port; the others were told it."""
        if self.spec.rank != 0 or self.spec.group.master_port:  # the client may have had it opened before
            return self.spec
        port = self.host.open_store(self.spec.key, self.spec.group.master_addr)
        self._notify(notices.StoreOpened(self.spec.attempt, self.spec.rank, port))
        return self.spec.with_port(port)

    def _watch(self) -> str:
        pause_s = POLL_S
        told_to_leave = False
        while (report := self.server.wait_exit(self.spec.key, pause_s)) is None:
            pause_s = POLL_S if self._tell_growth() else min(2 * pause_s, _IDLE_POLL_S)
            if self.host.leaving and not told_to_leave:
                told_to_leave = True
                self._notify(notices.Leaving(self.spec.attempt, self.spec.rank))
            self._look()
            if time.monotonic() - self.told_at > self.spec.supervision.alive_s:
                self._notify(self._alive())
        diagnostics.announce_flight_record(self.spool, self.spec)
        diagnostics.report_error_file(self.spool, report["status"])
        self._tell_growth()
        ended = self._ended(report)
        self._notify(ended)
        return notices.exit_to_json(ended)

    def _alive(self) -> notices.Alive:
        """The CPU time that the rank has used, and the use of its GPU if that is known."""
        cpu_s = self.process.cpu_s() if self.process is not None else 0.0
        gpu = self.host.gpu_of(self.spec.placement.slot) if self.spec.placement.use_gpu else None
        percent = gpu_percent(gpu) if gpu else None
        return notices.Alive(self.spec.attempt, self.spec.rank, cpu_s, percent)

    def _look(self) -> None:
        """See now and then how the process does: once it has been killed, nothing can be asked any more."""
        if time.monotonic() - self.looked_at < _MEMORY_S:
            return
        if self.memory is not None:
            self.memory.update()
        elif (pid := self.server.pid_of(self.spec.key)) is not None:
            self.process, self.memory = ProcessMonitor(pid), MemoryWatch(pid)
        else:
            return
        self.looked_at = time.monotonic()

    def _ended(self, report: dict[str, Any]) -> RankExit:
        """The exit as the rank server reports it, and what lies behind the signal."""
        oom, timed_out = "", False
        if report["status"] == -signal.SIGKILL and self.memory is not None:
            oom = self.memory.explain_kill()
        elif report["status"] == -signal.SIGABRT:
            timed_out = diagnostics.timed_out(self.spool)
        sizes = self.spool.sizes()
        process = report["pid"], report["status"], report["time_ns"]
        return RankExit(self.spec.attempt, self.spec.rank, *process, *sizes, oom=oom, timed_out=timed_out)

    def _tell_growth(self) -> bool:
        """Tell the driver how far the files are; whether they have grown."""
        sizes = dict(zip(("log", "events"), self.spool.sizes(), strict=True))
        if sizes == self.told:
            return False
        if self.spec.placement.shared:
            self._notify(notices.Growth(self.spec.attempt, self.spec.rank, sizes["log"], sizes["events"]))
        else:
            self._send_bytes(sizes)
        self.told = sizes
        return True

    def _send_bytes(self, sizes: dict[str, int]) -> None:
        """Send what is new, up to the rate; the driver fetches what is left out."""
        budget = int(_RATE_BYTES_PER_S * POLL_S)
        for stream, path in (("events", self.spool.events), ("log", self.spool.log)):
            offset = self.told[stream]
            end = min(sizes[stream], offset + budget)
            while offset < end:
                data = spool.read_chunk(path, offset, min(_NOTICE_BYTES, end - offset))
                self._notify(notices.Output(self.spec.attempt, self.spec.rank, stream, offset, data))
                offset += len(data)
        self._notify(notices.Growth(self.spec.attempt, self.spec.rank, sizes["log"], sizes["events"]))

    def _notify(self, notice: notices.Notice) -> None:
        self.worker.log_event(topic(self.spec.run_id), notices.encode(notice))
        self.told_at = time.monotonic()


async def describe_host(run_id: str, dask_worker: Worker, lost_after_s: float | None = None) -> dict[str, str]:
    """For client.run: make the worker a host of the run's ranks, where it is none, and say where its spool is.

    Its connections survive a cut of `lost_after_s` from now on (None leaves them as they are). "token" is that of the
    file of this name in "scratch", by which a driver knows that it sees the same files. Raises RankServerLost,
    ClusterError.
    """
    host = await attach(dask_worker, run_id)
    if lost_after_s is not None:
        follow(dask_worker, lost_after_s)
    return {
        "scratch": str(host.scratch),
        "token": host.token,
        "pid": str(os.getpid()),
        "hostname": socket.gethostname(),
        "interface": host.interface or "",
        "gpus": ",".join(host.gpus),
    }


async def stop_ranks(run_id: str, keys: list[str], grace_s: float | None, dask_worker: Worker) -> None:
    """For client.run: stop the ranks of these keys; those of other workers are passed over.

    A coroutine, for Dask starts only those without waiting for them.
    """
    with contextlib.suppress(RankServerLost):  # then it has no ranks any more
        host = rank_host(dask_worker, run_id)
        for key in keys:
            host.stop(key, grace_s)


async def tell_ranks(run_id: str, keys: list[str], order: str, dask_worker: Worker) -> None:
    """For client.run: send a command to the ranks of these keys that run on this worker. Raises CommandError."""
    command = commands.decode(order)
    with contextlib.suppress(RankServerLost):  # then it has no ranks any more
        host = rank_host(dask_worker, run_id)
        for key in keys:
            if command is Command.STACKS and (pid := host.server.pid_of(key)) is not None:
                _stand_by(host, run_id, key, pid)
            host.server.send_command(key, command)


def _stand_by(host: RankHost, run_id: str, key: str, pid: int) -> None:
    attempt, rank = (int(word) for word in key.removeprefix(key_prefix(run_id)).split("/"))
    diagnostics.report_if_silent(spool.rank_spool(host.scratch, run_id, attempt, rank), pid, attempt, rank)


async def read_spool(run_id: str, path: str, offset: int, size_bytes: int, dask_worker: Worker) -> bytes:
    """For client.run: bytes of a file below the run's scratch folder. Raises PermissionError for any other."""
    host = rank_host(dask_worker, run_id)
    return await asyncio.to_thread(_read_below, host.scratch, path, offset, size_bytes)


def _read_below(scratch: Path, path: str, offset: int, size_bytes: int) -> bytes:
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(scratch)):
        raise PermissionError(f"{path} is outside of the scratch folder {scratch}")
    return spool.read_chunk(real, offset, size_bytes)


async def holds_file(path: str, text: str) -> bool:
    """For client.run: whether this worker sees a file of that content, as the driver does."""

    def look() -> bool:
        try:
            return Path(path).read_text(encoding="utf-8") == text
        except (OSError, UnicodeDecodeError):
            return False

    return await asyncio.to_thread(look)


async def write_spool(run_id: str, path: str, offset: int, data: bytes, dask_worker: Worker) -> str:
    """For client.run: put bytes into the file `path` below the run's scratch folder; return the whole path.

    Raises PermissionError for a path that leads out of it.
    """
    folder = rank_host(dask_worker, run_id).scratch / run_id
    return await asyncio.to_thread(_write_below, folder, path, offset, data)


def _write_below(folder: Path, path: str, offset: int, data: bytes) -> str:
    real = Path(os.path.realpath(folder / path))
    if not real.is_relative_to(os.path.realpath(folder)):
        raise PermissionError(f"{path} is outside of the folder {folder}")
    real.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with real.open("r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(data)
    return str(real)


async def sealing_key(run_id: str, dask_worker: Worker) -> str:
    """For client.run: what the environment of ranks on this worker is sealed with on its way here."""
    opener = rank_host(dask_worker, run_id).opener
    return await asyncio.to_thread(lambda: opener.public)


async def offer(dask_worker: Worker) -> dict[str, Any]:
    """For client.run: {"slots", "gpus", "hostname", "ours"}: what this worker has for ranks; `gpus` is a number."""
    slots, gpus = await asyncio.to_thread(offered_slots, dask_worker)
    ours = own_host(dask_worker) is not None
    return {"slots": slots, "gpus": len(gpus), "hostname": socket.gethostname(), "ours": ours}


async def await_warm(timeout_s: float, dask_worker: Worker) -> dict[str, Any]:
    """For client.run, answered once ranks start warm here, or never will: {"ours", "warm", "slots", "gpus", ...}.

    With "hostname" and "fault". A worker of others answers at once: it has no rank server until a run comes.
    """
    host = own_host(dask_worker)
    deadline = time.monotonic() + timeout_s
    while host is not None and not host.server.ready.is_set() and host.server.fault is None:
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(POLL_S)
    slots, gpus = await asyncio.to_thread(offered_slots, dask_worker)
    return {
        "ours": host is not None,
        "warm": host is not None and host.metric(dask_worker)["warm"],
        "slots": slots,
        "gpus": list(gpus),
        "hostname": socket.gethostname(),
        "fault": host.server.fault if host is not None else None,
    }


async def set_slots(n: int, dask_worker: Worker) -> dict[str, int]:
    """For client.run: from now on `n` ranks fit on this worker; return its slots and GPUs. What runs there runs on.

    Raises ClusterError where it is not ours, or has fewer GPUs.
    """
    host = own_host(dask_worker)
    if host is None:
        raise ClusterError(f"the worker {dask_worker.address} was not started by ddptrain: its slots can't be changed")
    resources = slot_resources(n, host.gpus)
    await dask_worker.set_resources(**resources)
    return {"slots": n, "gpus": int(resources.get(GPU_RESOURCE, 0))}
