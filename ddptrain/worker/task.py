"""What the driver has a worker do: run one rank to its end, stop it, and read from its spool."""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
from pathlib import Path
from typing import Any

from dask.system import cpu_count
from distributed import Worker, get_worker

from ddptrain.spec import RankExit, RankSpec
from ddptrain.worker import environment, spool
from ddptrain.worker.host import RankHost, rank_host

POLL_S = 0.02  # how soon the driver hears that a busy rank has printed something
_IDLE_POLL_S = 0.1  # of one that has been silent for a while: each look costs the training some microseconds
_NOTICE_BYTES = 12 * 1024  # of log or events in one message: the scheduler keeps the last thousand of a topic
_RATE_BYTES_PER_S = 1 << 20  # per rank through the scheduler; what is over it the driver fetches from the spool


def run_rank(spec_json: str) -> str:
    """The Dask task of a rank: start it, tell of its growth, and return its RankExit as JSON when it has ended.

    Raises:
        RankServerLost: no rank could be started, or its server died.
    """
    spec = RankSpec.from_json(spec_json)
    worker = get_worker()
    return _RankTask(worker, rank_host(worker), spec).run()


def topic(run_id: str) -> str:
    """The Dask topic of a run's notices."""
    return f"ddptrain/{run_id}"


class _RankTask:
    """One rank, from its order to its exit, seen from its worker."""

    def __init__(self, worker: Worker, host: RankHost, spec: RankSpec) -> None:
        self.worker = worker
        self.host = host
        self.spec = spec
        self.spool = spool.rank_spool(host.scratch, spec.run_id, spec.attempt, spec.rank)
        self.told = {"log": 0, "events": 0}

    def run(self) -> str:
        self.spool.create()
        spec = self._completed()
        self.host.hold(spec.key, spec.key, spec.grace_s)
        append = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        log_fd, events_fd = os.open(self.spool.log, append), os.open(self.spool.events, append)
        try:
            self.host.server.start_rank(spec.key, spec.to_json(), log_fd, events_fd)
        finally:
            os.close(log_fd)
            os.close(events_fd)
        return self._watch()

    def _completed(self) -> RankSpec:
        return environment.complete(
            self._with_rendezvous(),
            self.host.environ,
            gpu=self.host.gpu_of(self.spec.slot),
            cpus=cpu_count(),
            staging=str(self.spool.staging),
        )

    def _with_rendezvous(self) -> RankSpec:
        """Rank 0's task opens the gang's store and publishes its port; the others were told it."""
        if self.spec.rank != 0:
            return self.spec
        port = self.host.open_store(self.spec.key, self.spec.master_addr)
        self._notify(store_port=port)
        return dataclasses.replace(self.spec, master_port=port)

    def _watch(self) -> str:
        pause_s = POLL_S
        while (report := self.host.server.wait_exit(self.spec.key, pause_s)) is None:
            pause_s = POLL_S if self._tell_growth() else min(2 * pause_s, _IDLE_POLL_S)
        self._tell_growth()
        log_size, events_size = self.spool.sizes()
        ended = RankExit(self.spec.rank, report["pid"], report["status"], report["time_ns"], log_size, events_size)
        self._notify(exit=ended.to_json())
        return ended.to_json()

    def _tell_growth(self) -> bool:
        """Tell the driver how far the files are; whether they have grown."""
        sizes = dict(zip(("log", "events"), self.spool.sizes(), strict=True))
        if sizes == self.told:
            return False
        if self.spec.shared:
            self._notify(sizes=sizes)
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
                self._notify(stream=stream, offset=offset, data=data)
                offset += len(data)
        self._notify(sizes=sizes)

    def _notify(self, **fields: Any) -> None:
        message = {"attempt": self.spec.attempt, "rank": self.spec.rank, **fields}
        self.worker.log_event(topic(self.spec.run_id), message)


def describe_host(dask_worker: Worker) -> dict[str, str]:
    """For client.run: where this worker's spool is, and the token by which a driver knows its file system."""
    host = rank_host(dask_worker)
    return {"scratch": str(host.scratch), "token": host.token, "pid": str(os.getpid())}


async def stop_ranks(keys: list[str], grace_s: float | None, dask_worker: Worker) -> None:
    """For client.run: stop the ranks of these keys; those of other workers are passed over.

    A coroutine, for Dask starts only those without waiting for them.
    """
    host = rank_host(dask_worker)
    for key in keys:
        host.stop(key, grace_s)


def read_spool(path: str, offset: int, size_bytes: int, dask_worker: Worker) -> bytes:
    """For client.run: bytes of a file below this worker's scratch folder. Raises PermissionError for any other."""
    host = rank_host(dask_worker)
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(host.scratch)):
        raise PermissionError(f"{path} is outside of the scratch folder {host.scratch}")
    return spool.read_chunk(real, offset, size_bytes)


def remove_spool(run_id: str, dask_worker: Worker) -> None:
    """For client.run: delete what a run has left in this worker's scratch folder (in a thread: it may be large)."""
    host = rank_host(dask_worker)
    folder = host.scratch / run_id
    threading.Thread(target=shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}).start()
