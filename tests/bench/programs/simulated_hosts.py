"""Simulated hosts: real Dask workers and rank hosts in one process, with stubs in place of the ranks.

A stub is no process. One thread writes the events and the log of all ranks of this process, as real ranks would write
them into their spools: started, entered, then metrics at a rate, finished.

    python simulated_hosts.py tcp://127.0.0.1:8786 FIRST HOSTS SLOTS EVENTS_PER_S SECONDS FOLDER
"""

from __future__ import annotations

import asyncio
import heapq
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dask
from distributed import Worker

from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import WORKER_METRIC, RankSpec
from ddptrain.worker.rank_host import RankHost, slot_resources
from ddptrain.worker.rank_server_client import RankServerClient

_NO_PROCESS = (1 << 22) + 1  # a pid that Linux never gives
_LOG_EVERY = 10  # events


def workload(ctx: Any) -> None:
    """Named by the configuration; no rank calls it."""


@dataclass(slots=True)
class _Stub:
    """A rank that is simulated. Its files are the spool's."""

    key: str
    rank: int
    log: int
    events: int
    server: StubServer
    done: int = 0
    status: int | None = None  # set when it was stopped


class Ticker(threading.Thread):
    """Writes what the stubs of this process have to say, each at its time."""

    def __init__(self, every_s: float, seconds: float) -> None:
        super().__init__(name="ticker", daemon=True)
        self.every_s, self.count = every_s, round(seconds / every_s)
        self.due: list[tuple[float, str, _Stub]] = []
        self.mutex = threading.Lock()

    def add(self, stub: _Stub) -> None:
        """Let a stub begin."""
        os.write(stub.events, events.encode(events.Started(time.time_ns(), _NO_PROCESS, "simulated")))
        os.write(stub.events, events.encode(events.Entered(time.time_ns())))
        with self.mutex:
            heapq.heappush(self.due, (time.monotonic() + self.every_s * (stub.rank % 16) / 16, stub.key, stub))

    def run(self) -> None:
        while True:
            with self.mutex:
                ready = []
                while self.due and self.due[0][0] <= time.monotonic():
                    ready.append(heapq.heappop(self.due))
            for at, _, stub in ready:
                if self._speak(stub):
                    with self.mutex:
                        heapq.heappush(self.due, (at + self.every_s, stub.key, stub))
            time.sleep(0.01)

    def _speak(self, stub: _Stub) -> bool:
        """Write one event; return whether there are more."""
        if stub.status is None and stub.done < self.count:
            stub.done += 1
            values = {"loss": 1.0 / stub.done, "rate": 100.0 + stub.rank}
            os.write(stub.events, events.encode(events.Metrics(time.time_ns(), values, stub.done)))
            if stub.done % _LOG_EVERY == 0:
                os.write(stub.log, f"step {stub.done} of {self.count}\n".encode())
            return True
        if stub.status is None:
            os.write(stub.log, b"the last line\n")
            os.write(stub.events, events.encode(events.Finished(time.time_ns())))
        os.close(stub.log)
        os.close(stub.events)
        stub.server.end(stub)
        return False


class StubServer(RankServerClient):
    """The client of a rank server that does not exist: its requests start stubs in this process."""

    def __init__(self, ticker: Ticker) -> None:
        super().__init__({}, Path(os.devnull))
        self.ticker = ticker
        self.stubs: dict[str, _Stub] = {}
        self.ready.set()

    def _start(self, env: Mapping[str, str]) -> socket.socket:
        return socket.socket()  # not used

    def listen(self) -> None:
        """Do nothing: reports are calls."""

    def close(self) -> None:
        """Do nothing."""

    def _send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        if message["op"] == "fork":
            spec_fd, log, written = map(os.dup, fds or [])
            with open(spec_fd, "rb") as file:
                file.seek(0)
                spec = RankSpec.from_json(file.read().decode())
            stub = _Stub(message["id"], spec.rank, log, written, self)
            self.stubs[stub.key] = stub
            self._handle({"report": "started", "id": stub.key, "pid": _NO_PROCESS, "how": "simulated"})
            self.ticker.add(stub)
        elif message["op"] == "stop" and (found := self.stubs.get(message["id"])) is not None:
            found.status = -signal.SIGTERM

    def end(self, stub: _Stub) -> None:
        """Report the end of a stub."""
        del self.stubs[stub.key]
        report = {"report": "exited", "id": stub.key, "pid": _NO_PROCESS, "status": stub.status or 0}
        self._handle({**report, "time_ns": time.time_ns()})


class _SimulatedThreadPoolExecutor(ThreadPoolExecutor):
    """Does not wait for its threads at the end. Dask recognizes it by its name."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


async def _serve(scheduler: str, first: int, hosts: int, slots: int, ticker: Ticker, folder: Path) -> None:
    workers = []
    for number in range(first, first + hosts):
        server = StubServer(ticker)
        scratch = Path(tempfile.mkdtemp(prefix=f"host-{number}-", dir=folder))
        host = RankHost(server, partial(StubServer, ticker), dict(os.environ), (), scratch)
        worker = Worker(
            scheduler,
            name=f"host-{number}",
            nthreads=1024,
            executor=_SimulatedThreadPoolExecutor(1024, f"host-{number}"),
            resources=slot_resources(slots, ()),
            host=f"127.0.{1 + number // 250}.{1 + number % 250}",
            local_directory=str(scratch),
            plugins=(host,),
            memory_limit=0,
            dashboard=False,
        )
        worker.metrics[WORKER_METRIC] = host.metric
        workers.append(worker)
    await asyncio.gather(*workers)
    (folder / f"ready-{first}").touch()
    await asyncio.Event().wait()


def main(scheduler: str, first: str, hosts: str, slots: str, events_per_s: str, seconds: str, folder: str) -> None:
    """Run the workers until the process is told to end."""
    dask.config.set(
        {
            "distributed.worker.http.routes": [],
            "distributed.worker.profile.enabled": False,
            "distributed.admin.system-monitor.interval": "5s",
            "distributed.admin.tick.interval": "1s",
            "distributed.diagnostics.nvml": False,
        }
    )
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    ticker = Ticker(1 / float(events_per_s), float(seconds))
    ticker.start()
    asyncio.run(_serve(scheduler, int(first), int(hosts), int(slots), ticker, Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
