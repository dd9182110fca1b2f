"""Another process attacks every kind of cluster that we start: it executes nothing, and the attacked run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from distributed.comm.core import connect

from tests.conftest import Cli
from tests.integration.test_cluster import Clusters, clusters, is_gone
from tests.servers.attacker import NOBODY
from tests.servers.dask_cluster import DaskCluster
from tests.support.command import wait_until

__all__ = ["clusters"]  # a fixture
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


@pytest.fixture
def marker() -> Iterator[Path]:
    """A folder that every user may make."""
    path = Path("/tmp") / f"ddptrain-attack-{os.getpid()}"
    yield path
    if path.exists():
        path.rmdir()


def listening_ports(processes: Iterable[psutil.Process]) -> list[int]:
    """The TCP ports of some processes, and of their children, as /proc/net/tcp shows them to everyone."""
    everyone = {*processes, *(child for process in processes for child in process.children(recursive=True))}
    return sorted(
        {
            connection.laddr.port
            for process in everyone
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
    )


def attacked(ports: Sequence[int], marker: Path, *, as_other_user: bool) -> str:
    """What the attacker has printed."""
    who = ["user"] if as_other_user else []
    command = [sys.executable, "-m", "tests.servers.attacker"]
    command += [",".join(map(str, ports)), str(marker), *who]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.stdout.count("failed") + done.stdout.count("answered") == 4 * len(ports), done
    return done.stdout


def test_attack_succeeds_on_a_scheduler_without_protection(marker: Path, tmp_path: Path) -> None:
    """Otherwise the tests below would prove nothing."""
    cluster = DaskCluster(tmp_path)
    try:
        port = int(cluster.address.rpartition(":")[2])
        assert "run_on_scheduler answered" in attacked([port], marker, as_other_user=os.geteuid() == 0)
        assert marker.exists()
    finally:
        cluster.close()


@pytest.mark.slow
@needs_root
def test_other_user_runs_nothing_through_an_embedded_cluster(run_cli: Cli, marker: Path) -> None:
    go = run_cli.folder / "go"
    (run_cli.folder / "work.py").write_text(
        "import os, time\ndef hold(ctx, until):\n"
        "    print(f'rank {ctx.rank} holds', flush=True)\n"
        "    while not os.path.exists(until): time.sleep(0.02)\n"
    )
    (run_cli.folder / "hold.yaml").write_text(json.dumps({"workload": "work:hold", "params": {"until": str(go)}}))
    running = run_cli.start("train", "hold.yaml", "--ranks", "2")
    for rank in range(2):
        running.wait_for(f"rank {rank} holds")
    ports = listening_ports([psutil.Process(running.popen.pid)])
    assert len(ports) >= 2, "scheduler and worker listen"
    assert "answered" not in attacked(ports, marker, as_other_user=True)
    assert not marker.exists()
    go.touch()
    done = running.finish()
    assert done.rc == 0, done.stderr


@needs_root
def test_other_user_runs_nothing_through_a_local_cluster(clusters: Clusters, marker: Path) -> None:
    clusters.up()
    running = clusters.start_run()
    processes = [clusters.process("scheduler"), clusters.process("worker")]
    told = attacked(listening_ports(processes), marker, as_other_user=True)
    assert told.count("failed") >= 4 and "answered" not in told
    assert not marker.exists()
    assert clusters.finish(running).rc == 0


# Listens where a scheduler has been, as another user, and answers whoever comes with a pickle that makes a folder.
FORGED = f"""
import os, pickle, socket, struct, sys
from distributed.protocol.core import dumps
from distributed.protocol import to_serialize
from distributed.protocol.utils import pack_frames
port, marker = sys.argv[1:]
class Attack:
    def __reduce__(self):
        return os.mkdir, (marker,)
os.setgroups([]); os.setgid({NOBODY})
os.setuid({NOBODY})
listening = socket.create_server(("127.0.0.1", int(port)))
print("ready", flush=True)
greeting = {{"compression": None, "python": (3, 11, 0), "pickle-protocol": 5, "x": to_serialize(Attack())}}
frames = pack_frames(dumps(greeting))
while True:
    connection, _ = listening.accept()
    try:
        connection.sendall(struct.pack("Q", len(frames)) + frames)
        print("heard", len(connection.recv(100)), flush=True)
    except OSError as error:
        print("hung up", flush=True)
"""


@contextlib.contextmanager
def forged_scheduler(port: str, marker: Path) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", FORGED, port, str(marker)], stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None and it.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            it.kill()


@needs_root
def test_forged_scheduler_executes_code_in_a_client_that_trusts_it(marker: Path) -> None:
    """Otherwise the test below would prove nothing."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with forged_scheduler(str(port), marker), contextlib.suppress(OSError):
        asyncio.run(connect(f"tcp://127.0.0.1:{port}", timeout=5))
    assert marker.exists()


@pytest.mark.slow
@needs_root
def test_forged_scheduler_of_a_stale_record_executes_nothing(clusters: Clusters, marker: Path) -> None:
    """The cluster was killed, and somebody else listens at its address: no command unpickles the answer."""
    address = clusters.up()["address"]
    parts = [clusters.process(part) for part in ("worker", "scheduler")]
    for part in parts:
        part.kill()
    wait_until(lambda: all(is_gone(part) for part in parts))  # till then the address is in use
    with forged_scheduler(address.rpartition(":")[2], marker):
        assert clusters("status").rc == 0
        clusters("status", "dev", rc=4)
        cluster = {"start_timeout_s": 5.0}  # so long it waits for an answer that can be trusted
        config = {"workload": "work:hold", "params": {"until": "x"}, "cluster": cluster}
        (clusters.folder / "c.yaml").write_text(json.dumps(config))
        trained = clusters.cli("train", "c.yaml", "--cluster", "dev")
        assert trained.rc == 4, trained
        assert not marker.exists()
