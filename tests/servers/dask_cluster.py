"""A Dask cluster that somebody else has started: a scheduler, and workers of ddptrain or of `dask worker`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from distributed import Client, Security

from tests.support.command import PATIENCE_S


class DaskCluster:
    """The processes of a cluster, as their users start them; their output is in `cluster.log`."""

    def __init__(self, folder: Path, *tls: str, env: Mapping[str, str] | None = None) -> None:
        """Start the scheduler; `tls` are its options for TLS."""
        self.folder, self.env = folder, {**os.environ, **(env or {})}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.file = folder / "scheduler.json"
        where = ("--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(self.file))
        http = ("--no-dashboard", "--dashboard-address", "127.0.0.1:0")
        self.start(sys.executable, "-P", "-m", "distributed.cli.dask_scheduler", *where, *http, *tls)
        self.address = self._address()

    def _address(self) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError, ValueError):  # not there, or written by half
                return str(json.loads(self.file.read_text())["address"])
            assert time.monotonic() < deadline, "the scheduler did not start"
            time.sleep(0.05)

    def start(self, *command: str, **env: str) -> subprocess.Popen[bytes]:
        """Start a process that ends with the cluster."""
        with (self.folder / "cluster.log").open("ab") as log:
            started = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, env={**self.env, **env}
            )
        self.processes.append(started)
        return started

    def add_worker(self, *prefix: str, slots: int = 2, scratch: Path | None = None) -> subprocess.Popen[bytes]:
        """A worker of ddptrain, which `prefix` executes."""
        command = [*prefix, sys.executable, "-m", "ddptrain.worker", "--scheduler", self.address, "--slots", str(slots)]
        return self.start(*command, *(("--scratch", str(scratch)) if scratch else ()))

    def add_dask_worker(self, name: str, *options: str, **env: str) -> subprocess.Popen[bytes]:
        """`dask worker`, with a nanny, one thread and a folder of its own."""
        where = ("--scheduler-file", str(self.file), "--no-dashboard", "--name", name)
        local = ("--local-directory", str(self.folder / name))
        return self.start(
            sys.executable, "-m", "distributed.cli.dask_worker", *where, *local, "--nthreads", "1", *options, **env
        )

    def wait_for_workers(self, count: int) -> None:
        """Return once so many have joined."""
        with self.client() as client:
            client.wait_for_workers(count, timeout=PATIENCE_S)

    def client(self, security: Security | None = None) -> Client:
        """A client of the scheduler."""
        return Client(self.address, set_as_default=False, timeout=PATIENCE_S, security=security)

    def close(self) -> None:
        """End the workers, then the scheduler: a Dask worker that misses its scheduler takes a minute to end."""
        scheduler, *workers = self.processes
        for processes in (workers, [scheduler]):
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@pytest.fixture
def up_cluster(tmp_path: Path) -> Iterator[DaskCluster]:
    """A scheduler without workers."""
    cluster = DaskCluster(tmp_path)
    yield cluster
    cluster.close()


def write_tls(folder: Path) -> None:
    """Write cert.pem and key.pem: a key that signs itself, as an administrator may hand it out."""
    made = Security.temporary()
    (folder / "cert.pem").write_text(made.tls_ca_file)
    (folder / "key.pem").write_text(made.tls_client_key)
