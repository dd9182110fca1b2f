"""Why there is no scheduler, in plain words and in time."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddptrain.clusters.find import Target
from ddptrain.clusters.security import make_tls, own_security
from ddptrain.driver.connect import connected
from ddptrain.errors import ClusterError


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


def test_silent_port_is_not_waited_for_for_ever(silent: int) -> None:
    told = refused(Target(f"tcp://127.0.0.1:{silent}"))
    assert f"no Dask scheduler answers at tcp://127.0.0.1:{silent} within 0.5 s" in told and "says nothing" in told


def test_cluster_of_the_users_own_that_is_gone_says_how_to_clear_up() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        told = refused(Target(address, name="dev"), timeout_s=30)
    assert f"the scheduler of the cluster dev does not answer at {address}: connection refused" in told
    assert "ddptrain cluster down dev" in told


def test_scheduler_of_the_users_own_that_is_busy_is_given_longer(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there: a machine with other work takes more than three seconds for a handshake with TLS."""
    given: list[float] = []
    told: list[str] = []

    def tried(target: Target, timeout_s: float) -> str:
        given.append(timeout_s)
        if len(given) == 1:
            raise TimeoutError("timed out after 3 s")
        return "a client"

    monkeypatch.setattr("ddptrain.driver.connect._tried", tried)
    monkeypatch.setattr("ddptrain.driver.connect._why_not", lambda target: "")
    address = f"tcp://127.0.0.1:{silent}"
    client: object = connected(Target(address, name="dev"), 300, told.append)
    assert client == "a client" and told == [f"waiting for the Dask scheduler at {address}: timed out after 3 s"]
    assert given[1] > given[0]


def test_unknown_host_is_told_as_such() -> None:
    assert "the host of tcp://nowhere.invalid:1 is unknown" in refused(Target("tcp://nowhere.invalid:1"), timeout_s=30)


def test_missing_certificate_is_told_before_anything_is_tried() -> None:
    told = refused(Target("tls://127.0.0.1:1"), timeout_s=30)
    assert "wants a certificate, and none was given: set cluster.tls.ca_file" in told


def test_certificate_of_another_cluster_is_told(speaks_tls: int, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    make_tls(tmp_path / "ours")
    told = refused(Target(f"tls://127.0.0.1:{speaks_tls}", own_security(tmp_path / "ours")), timeout_s=30)
    assert "shows a certificate that ours does not vouch for" in told


def test_address_without_tls_of_a_scheduler_with_it_is_told(speaks_tls: int) -> None:
    told = refused(Target(f"tcp://127.0.0.1:{speaks_tls}"), timeout_s=30)
    assert f"speaks TLS: write the address as tls://127.0.0.1:{speaks_tls}" in told


def test_scheduler_of_an_old_dask_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TypeError("identity() got an unexpected keyword argument 'n_workers'")

    monkeypatch.setattr("ddptrain.driver.connect.Client", refuse)
    told = refused(Target("tcp://127.0.0.1:1"), timeout_s=30)
    assert "identity() got an unexpected" in told and "distributed 2025.7 or newer is needed there" in told
