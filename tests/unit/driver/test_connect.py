"""Why there is no scheduler, in plain words and in time: real sockets, and a real command."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddptrain.clusters.resolve import Target
from ddptrain.clusters.security import make_tls, own_security
from ddptrain.driver.connect import connected
from ddptrain.errors import ClusterError

SOON_S = 60.0  # for what takes ten seconds where nothing else runs; the cluster may take ten minutes to start


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of one who takes connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        yield int(listening.getsockname()[1])


@pytest.fixture
def speaks_tls(tmp_path: Path) -> Iterator[int]:
    """The port of one who makes TLS handshakes with a certificate of its own, and wants one that it vouches for."""
    (tmp_path / "theirs").mkdir()
    make_tls(tmp_path / "theirs")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "theirs" / "cert.pem", tmp_path / "theirs" / "key.pem")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        thread = threading.Thread(target=_serve, args=(listening, context))
        thread.start()
        yield int(listening.getsockname()[1])
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def _serve(listening: socket.socket, context: ssl.SSLContext) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        connection.settimeout(30)
        try:
            with context.wrap_socket(connection, server_side=True) as secured:
                secured.recv(1)
        except OSError:
            connection.close()


def refused(target: Target, timeout_s: float = 0.5) -> str:
    with pytest.raises(ClusterError) as error:
        connected(target, timeout_s, lambda text: None)
    return str(error.value)


@contextlib.contextmanager
def server(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """The port of a server that calls `answer` for each connection, and holds it until the client closes it."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            connections.append(connection)
            threads.append(threading.Thread(target=talk, args=(connection,)))
            threads[-1].start()

    def talk(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            answer(connection)
            while connection.recv(4096):
                pass

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        connections: list[socket.socket] = []
        threads = [threading.Thread(target=serve)]
        threads[0].start()
        yield int(listening.getsockname()[1])
        listening.shutdown(socket.SHUT_RDWR)
        threads[0].join()
        for connection in connections:
            with contextlib.suppress(OSError):  # the client has closed it
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for connection in connections:
            connection.close()


def sends(data: bytes) -> Callable[[socket.socket], object]:
    return lambda connection: connection.sendall(data)


def test_silent_port_is_given_up_long_before_the_cluster_must_have_started(silent: int) -> None:
    began = time.monotonic()
    told = refused(Target(f"tcp://127.0.0.1:{silent}"), timeout_s=600)
    assert "no Dask scheduler answers at" in told and "does not answer as a Dask scheduler" in told
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (sends(b"SSH-2.0-OpenSSH_9.6\r\n"), "is possible (WRONG_VERSION_NUMBER)"),
        (sends(bytes(4096)), "no TLS connection to"),
    ],
)
def test_what_speaks_no_tls_is_an_error_at_once(
    answer: Callable[[socket.socket], object], reason: str, tmp_path: Path
) -> None:
    make_tls(tmp_path)
    with server(answer) as port:
        told = refused(Target(f"tls://127.0.0.1:{port}", own_security(tmp_path)), timeout_s=600)
    assert reason in told and f"tls://127.0.0.1:{port}" in told


def test_command_that_could_not_connect_ends_without_a_traceback_of_dask() -> None:
    """At the exit, Dask's own client says goodbye in a thread that has ended, waits 6 s, and prints the timeout."""
    program = (
        "import sys\n"
        "from ddptrain.clusters.resolve import Target\n"
        "from ddptrain.driver import connect\n"
        "try:\n"
        "    connect.connected(Target(sys.argv[1]), 600, print)\n"
        "except connect.ClusterError as error:\n"
        "    print(error)\n"
    )
    with server(sends(b"SSH-2.0-OpenSSH_9.6\r\n")) as port:
        command = [sys.executable, "-c", program, f"tcp://127.0.0.1:{port}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SOON_S, check=True)
    assert "is not a Dask scheduler" in ended.stdout
    assert ended.stderr == ""


def test_cluster_of_the_users_own_that_is_gone_says_how_to_clear_up() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        told = refused(Target(address, name="dev"), timeout_s=30)
    assert f"the scheduler of the cluster dev does not answer at {address}: connection refused" in told
    assert "ddptrain cluster down dev" in told


def test_certificate_of_another_cluster_is_told(speaks_tls: int, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    make_tls(tmp_path / "ours")
    told = refused(Target(f"tls://127.0.0.1:{speaks_tls}", own_security(tmp_path / "ours")), timeout_s=30)
    assert "no TLS connection to" in told and "certificate" in told


def test_address_without_tls_of_a_scheduler_with_it_is_told(speaks_tls: int) -> None:
    told = refused(Target(f"tcp://127.0.0.1:{speaks_tls}"), timeout_s=30)
    assert f"If it uses TLS, write tls://127.0.0.1:{speaks_tls}" in told
