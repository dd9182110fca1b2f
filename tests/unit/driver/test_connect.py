"""Why there is no scheduler, in plain words and in time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import socket
import ssl
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.clusters.resolve import Target
from ddptrain.clusters.security import make_tls, own_security
from ddptrain.driver import connect, port_diagnosis
from ddptrain.driver.connect import connected
from ddptrain.errors import ClusterError
from ddptrain.protocol import unix_comm
from tests.support.fake_time import Clock

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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is a reason to give up after a tenth of a second instead of seven: for peers that say nothing at all."""
    monkeypatch.setattr(connect, "_SILENT_S", 0.1)
    monkeypatch.setattr(connect, "_MARGIN_S", 0.1)
    for module, name in ((connect, "_TRY_S"), (connect, "_PROBE_S"), (connect, "_SPEAKS_FIRST_S")):
        monkeypatch.setattr(module, name, 0.1)
    for name in ("_GREETING_S", "_HTTP_S"):
        monkeypatch.setattr(port_diagnosis, name, 0.1)


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For peers that do not speak first; one that is slow to answer is asked again."""
    monkeypatch.setattr(connect, "_TRY_S", 0.1)
    monkeypatch.setattr(connect, "_SPEAKS_FIRST_S", 0.3)
    monkeypatch.setattr(port_diagnosis, "_GREETING_S", 0.1)


@pytest.mark.usefixtures("quick")
def test_silent_port_is_not_waited_for_for_ever(silent: int) -> None:
    told = refused(Target(f"tcp://127.0.0.1:{silent}"))
    assert f"no Dask scheduler answers at tcp://127.0.0.1:{silent} within 0.5 s" in told
    assert told.endswith("sends nothing; is a firewall in the way?")


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


def speak_http(connection: socket.socket) -> None:
    if connection.recv(4096).startswith(b"GET / "):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    else:
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    connection.shutdown(socket.SHUT_RDWR)


def sends(data: bytes) -> Callable[[socket.socket], object]:
    return lambda connection: connection.sendall(data)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (sends(b"SSH-2.0-OpenSSH_9.6\r\n"), 'it says "SSH-2.0-OpenSSH_9.6"'),
        (sends(b"220 mail.example \x1b[31mESMTP\r\n"), "it sends other bytes (32 32 30 20 6d 61 69 6c ...)"),
        (sends(bytes(range(255, 127, -1)) * 64), "it sends other bytes (ff fe fd fc fb fa f9 f8 ...)"),
        (sends(bytes(4096)), "it sends other bytes (00 00 00 00 00 00 00 00 ...)"),
        (speak_http, "it uses HTTP: is that the port of Dask's dashboard?"),
    ],
)
def test_what_is_no_scheduler_is_told_within_seconds(
    answer: Callable[[socket.socket], object], reason: str, request: pytest.FixtureRequest
) -> None:
    if answer is speak_http:
        request.getfixturevalue("quick_looks")
    began = time.monotonic()
    with server(answer) as port:
        told = refused(Target(f"tcp://127.0.0.1:{port}"), timeout_s=600)
    assert told.startswith(f"what listens at tcp://127.0.0.1:{port} is not a Dask scheduler: {reason}")
    assert time.monotonic() - began < SOON_S


@pytest.mark.usefixtures("quick")
def test_silent_port_is_given_up_long_before_the_cluster_must_have_started(silent: int) -> None:
    began = time.monotonic()
    told = refused(Target(f"tcp://127.0.0.1:{silent}"), timeout_s=600)
    assert "no Dask scheduler answers at" in told and "sends nothing" in told
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            sends(b"SSH-2.0-OpenSSH_9.6\r\n"),
            "does not speak TLS (WRONG_VERSION_NUMBER): it is not a Dask scheduler, or one",
        ),
        (speak_http, "does not speak TLS ("),
        (sends(bytes(4096)), "does not speak TLS ("),
        (lambda connection: None, "sends nothing"),
    ],
)
def test_what_speaks_no_tls_is_not_taken_for_a_wrong_certificate(
    answer: Callable[[socket.socket], object], reason: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if reason == "sends nothing":
        request.getfixturevalue("quick")
    make_tls(tmp_path)
    began = time.monotonic()
    with server(answer) as port:
        told = refused(Target(f"tls://127.0.0.1:{port}", own_security(tmp_path)), timeout_s=600)
    assert reason in told and f"tls://127.0.0.1:{port}" in told
    assert time.monotonic() - began < SOON_S


def test_answer_that_is_no_dask_message_after_a_late_greeting_is_no_bug_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dask takes the first bytes for a length, and allocates them."""
    monkeypatch.setattr("ddptrain.driver.port_diagnosis._GREETING_S", 0.01)
    monkeypatch.setattr(connect, "_SILENT_S", 60.0)  # a busy machine is slow to read it

    def late(connection: socket.socket) -> None:
        time.sleep(0.1)
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    with server(late) as port:
        told = refused(Target(f"tcp://127.0.0.1:{port}"), timeout_s=600)
    assert "is not a Dask scheduler" in told


def test_command_that_could_not_connect_ends_without_a_traceback_of_dask() -> None:
    """At the exit, Dask's own client says goodbye in a thread that has ended, waits 6 s, and prints the timeout."""
    program = (
        "import sys\n"
        "from ddptrain.clusters.resolve import Target\n"
        "from ddptrain.driver import connect\n"
        "connect._check_greeting = lambda target: None\n"  # as for a peer that greets late
        "try:\n"
        "    connect.connected(Target(sys.argv[1]), 600, print)\n"
        "except connect.ClusterError as error:\n"
        "    print(error)\n"
    )
    with server(speak_http) as port:
        command = [sys.executable, "-c", program, f"tcp://127.0.0.1:{port}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SOON_S, check=True)
    assert "is not a Dask scheduler" in ended.stdout
    assert ended.stderr == ""


GREETING = (58).to_bytes(8, "little") + (1).to_bytes(8, "little") + (42).to_bytes(8, "little")
GREETING += b"\x83\xabcompression\xc0\xa6python\x93\x03\x0b\x07\xafpickle-protocol\x05"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (GREETING, False),
        *((GREETING[:size], False) for size in (0, 1, 7, 8, 30, len(GREETING) - 1)),  # it may still come
        (GREETING.replace(b"compression", b"confessions").replace(b"pickle", b"nickel"), True),
        (b"SSH-2.0-x\r\n", True),
        (b"+OK\r\n", True),
        (b"HTTP/1.1 400 Bad Request\r\n", True),
        (b"\x15\x03\x01\x00\x02\x02\x28", True),  # a TLS alert
        (bytes(8), True),
        ((1 << 17).to_bytes(8, "little"), True),
    ],
)
def test_greeting_of_a_dask_scheduler_is_known_by_its_length_and_names(data: bytes, expected: bool) -> None:
    assert port_diagnosis.is_not_dask(data) is expected


@pytest.mark.usefixtures("quick_looks")
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

    monkeypatch.setattr(connect, "time", Clock())
    monkeypatch.setattr("ddptrain.driver.connect._try_connect", tried)
    monkeypatch.setattr("ddptrain.driver.connect._connection_problem", lambda target: "")
    address = f"tcp://127.0.0.1:{silent}"
    client: object = connected(Target(address, name="dev"), 300, told.append)
    assert client == "a client" and told == [f"waiting for the Dask scheduler at {address}: timed out after 3 s"]
    assert given[1] > given[0]


@pytest.mark.usefixtures("quick_looks")
def test_unknown_host_is_told_as_such() -> None:
    assert "the host of tcp://nowhere.invalid:1 is unknown" in refused(Target("tcp://nowhere.invalid:1"), timeout_s=30)


def test_missing_certificate_is_told_before_anything_is_tried() -> None:
    told = refused(Target("tls://127.0.0.1:1"), timeout_s=30)
    assert "wants a certificate, and none was given: set cluster.tls.ca_file" in told


def test_certificate_of_another_cluster_is_told(speaks_tls: int, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    make_tls(tmp_path / "ours")
    told = refused(Target(f"tls://127.0.0.1:{speaks_tls}", own_security(tmp_path / "ours")), timeout_s=30)
    assert "shows a certificate that our CA has not signed" in told


@pytest.mark.usefixtures("quick_looks")
def test_address_without_tls_of_a_scheduler_with_it_is_told(speaks_tls: int) -> None:
    told = refused(Target(f"tcp://127.0.0.1:{speaks_tls}"), timeout_s=30)
    assert f"uses TLS: write the address as tls://127.0.0.1:{speaks_tls}" in told


def test_scheduler_of_an_old_dask_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TypeError("identity() got an unexpected keyword argument 'n_workers'")

    monkeypatch.setattr("ddptrain.driver.connect.DriverClient", refuse)
    told = refused(Target("tcp://127.0.0.1:1"), timeout_s=30)
    assert "identity() got an unexpected" in told and "distributed 2025.7 or newer is needed there" in told


def test_socket_of_a_local_cluster_that_cannot_be_opened_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome: list[Exception | None] = [None]
    opened: list[tuple[str, float]] = []
    closed: list[bool] = []

    def connect_plain(address: str, timeout_s: float) -> SimpleNamespace:
        opened.append((address, timeout_s))
        if outcome[0] is not None:
            raise outcome[0]
        return SimpleNamespace(close=lambda: closed.append(True))

    monkeypatch.setattr(unix_comm, "connect_plain", connect_plain)
    local = Target("unix:///run/s")
    assert connect._connection_problem(local) == "" and closed == [True] and opened == [("unix:///run/s", 3.0)]
    outcome[0] = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    assert connect._connection_problem(local) == "connection refused"
    outcome[0] = OSError("Bad PATH")
    assert connect._connection_problem(local) == "bad path"
    outcome[0] = PermissionError("process 7 has it")
    with pytest.raises(ClusterError, match=r"^unix:///run/s belongs to a cluster of another user: process 7 has it$"):
        connect._connection_problem(local)
    assert connect._connection_problem(Target("ucx://h:1")) == ""


@pytest.mark.parametrize(
    ("name", "timeout_s", "reason", "limits", "told"),
    [
        ("dev", 300.0, "busy", [3.0, 6.0, 12.0, 6.0], "the cluster dev does not answer at tcp://h:1: busy"),
        ("dev", 5.0, "busy", [3.0, 1.0], "the cluster dev does not answer at tcp://h:1: busy"),
        ("dev", 300.0, port_diagnosis.SILENT, [3.0, 6.0, 12.0, 6.0], "does not answer at tcp://h:1: something"),
        ("dev", 300.0, "connection refused", [3.0], "does not answer at tcp://h:1: connection refused"),
        ("", 40.0, "busy", [3.0, 6.0, 12.0, 16.0], "answers at tcp://h:1 within 40 s: busy; is a firewall in the way?"),
        ("", 3.95, "busy", [3.0, 0.1], "answers at tcp://h:1 within 3.95 s: busy"),
        (
            "",
            5.0,
            "no such file or directory",
            [3.0, 1.0],
            "within 5 s: no such file or directory; is it up, and the port right?",
        ),
        ("", 600.0, port_diagnosis.SILENT, [3.0, 6.0], "answers at tcp://h:1 within 10 s: something accepts"),
    ],
)
def test_each_try_may_take_twice_as_long_until_the_limit_of_its_kind_of_cluster(
    monkeypatch: pytest.MonkeyPatch, name: str, timeout_s: float, reason: str, limits: list[float], told: str
) -> None:
    clock = Clock()
    tries: list[float] = []
    waits: list[str] = []

    def tried(_: Target, limit_s: float) -> None:
        tries.append(round(limit_s, 3))
        clock.sleep(limit_s)
        raise TimeoutError("timed out")

    monkeypatch.setattr(connect, "time", clock)
    monkeypatch.setattr(connect, "_check_greeting", lambda target: None)
    monkeypatch.setattr(connect, "_try_connect", tried)
    monkeypatch.setattr(connect, "_connection_problem", lambda target: reason)
    with pytest.raises(ClusterError) as raised:
        connected(Target("tcp://h:1", name=name), timeout_s, waits.append)
    assert tries == limits and told in str(raised.value)
    assert waits == [f"waiting for the Dask scheduler at tcp://h:1: {reason}"] * (len(limits) - 1)


@pytest.mark.parametrize("answers", [True, False])
def test_peer_that_never_answers_ends_the_try_two_seconds_after_dasks_own_limit(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    given: list[Any] = []
    limits: list[float | None] = []

    class Outcome(concurrent.futures.Future[Any]):
        """A result that comes too late, if at all."""

        def result(self, timeout: float | None = None) -> Any:
            limits.append(timeout)
            if timeout is not None:
                if answers:
                    super().result(60.0)
                raise concurrent.futures.TimeoutError
            return super().result(60.0)

        def done(self) -> bool:
            return answers

    monkeypatch.setattr(concurrent.futures, "Future", Outcome)

    def new_client(*names: str, **options: Any) -> str:
        assert threading.current_thread().daemon  # it must not keep the command from ending
        given.append((*names, options))
        return "client"

    monkeypatch.setattr(connect, "DriverClient", new_client)
    target = Target("tcp://h:1")
    if answers:
        client: object = connect._try_connect(target, 5.0)
        assert client == "client" and limits == [7.0, None]
    else:
        with pytest.raises(TimeoutError, match="something accepts the connection, but sends nothing"):
            connect._try_connect(target, 5.0)
        assert limits == [7.0]
        while not given:
            time.sleep(0.001)
    options = {"timeout": 5.0, "security": target.security, "set_as_default": False, "name": "ddptrain"}
    assert given == [("tcp://h:1", options)]


@pytest.mark.parametrize(
    ("target", "looked_at"),
    [
        (Target("tcp://h:7"), [("greeting", "tcp://h:7", "h", 7)]),
        (Target("tls://h:7"), [("tls", "tls://h:7")]),
        (Target("unix:///s"), []),
        (Target("tcp://h:7", name="dev"), []),
        (Target("tcp://h:7", foreign=False), []),
    ],
)
def test_only_addresses_of_the_user_are_looked_at_before_dask_connects(
    monkeypatch: pytest.MonkeyPatch, target: Target, looked_at: list[Any]
) -> None:
    seen: list[Any] = []

    def check(address: str, host: str, port: int) -> None:
        seen.append(("greeting", address, host, port))
        raise OSError("Dask's own attempt follows")

    monkeypatch.setattr(port_diagnosis, "check_greeting", check)
    monkeypatch.setattr(connect, "_connection_problem", lambda target: seen.append(("tls", target.address)))
    connect._check_greeting(target)
    assert seen == looked_at


def test_session_has_the_client_the_target_and_the_news_of_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    closed: list[bool] = []

    @contextlib.contextmanager
    def client(*arguments: Any) -> Iterator[str]:
        given.extend(arguments)
        yield "client"
        closed.append(True)

    monkeypatch.setattr(connect, "connected", client)
    cluster: Any = SimpleNamespace(connect=lambda: "target")
    config: Any = SimpleNamespace(
        cluster=SimpleNamespace(start_timeout_s=9.0), failure=SimpleNamespace(lost_after_s=40.0)
    )
    with connect.open_session(cluster, config, print) as session:
        assert (session.client, session.target, session.news._client) == ("client", "target", "client")  # type: ignore[comparison-overlap]
        assert given == ["target", 9.0, print, 40.0] and closed == []
    assert closed == [True]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ((1 << 16).to_bytes(8, "little"), False),
        (((1 << 16) + 1).to_bytes(8, "little"), True),
        ((1).to_bytes(8, "little") + b"x", True),  # complete, without the names
        ((2).to_bytes(8, "little") + b"x", False),
        (b"\0\0\0\x01", True),
        (b"\0\0\x01", False),
        (GREETING.replace(b"compression", b"confessions"), False),  # one of the names is enough
    ],
)
def test_length_of_a_greeting_has_a_limit(data: bytes, expected: bool) -> None:
    assert port_diagnosis.is_not_dask(data) is expected


@pytest.mark.parametrize("foreign", [True, False])
def test_limits_of_dask_are_set_and_its_messages_turned_off_before_the_first_try(
    monkeypatch: pytest.MonkeyPatch, foreign: bool
) -> None:
    settings: list[object] = []
    levels: dict[str, int] = {}
    ignored: list[object] = []
    monkeypatch.setattr(connect, "tcp_timeout", lambda seconds: {"limit": seconds})
    monkeypatch.setattr(connect, "dask", SimpleNamespace(config=SimpleNamespace(set=settings.append)))

    def logger(name: str) -> SimpleNamespace:
        return SimpleNamespace(setLevel=lambda level: levels.update({name: level}))

    monkeypatch.setattr(connect, "logging", SimpleNamespace(getLogger=logger, CRITICAL=50))
    monkeypatch.setattr(
        warnings, "filterwarnings", lambda action, category: ignored.append((action, category.__name__))
    )
    monkeypatch.setattr(connect, "_check_greeting", lambda target: None)
    monkeypatch.setattr(connect, "_try_connect", lambda target, limit_s: "client")
    client: object = connected(Target("tcp://h:1", foreign=foreign), 9.0, print, 40.0)
    assert client == "client" and settings == [{"limit": 40.0}]
    assert levels == {"distributed": 50, "distributed.client": 50}
    assert ignored == ([("ignore", "VersionMismatchWarning")] if foreign else [])
