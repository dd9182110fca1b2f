"""What is asked of Saturn, and what its answers become; a whole life is in tests/integration/test_saturn.py."""

from __future__ import annotations

import datetime as dt
import json
import logging
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Security

from ddptrain.clusters import cluster_records, security
from ddptrain.clusters.backends import saturn, saturn_api
from ddptrain.clusters.backends.saturn import SaturnProvider
from ddptrain.clusters.backends.saturn_api import NotTaken, Saturn
from ddptrain.clusters.cluster_records import ClusterRecord, Deployment
from ddptrain.config.sections.clusters import ClusterConfig
from ddptrain.errors import ClusterError, UsageError

pytest.importorskip("dask_saturn", reason='dask-saturn is not installed: pip install "ddptrain[saturn]"')


class Answers(HTTPServer):
    """Gives the answers that a test has prepared: status, body; then the last one again and again."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.prepared: list[tuple[int, Any]] = []
        self.asked: list[tuple[str, Any]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who hangs up has a reason."""


class _Handler(BaseHTTPRequestHandler):
    server: Answers

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((f"{self.command} {self.path}", json.loads(body) if body else None))
        prepared = self.server.prepared
        status, data = prepared.pop(0) if len(prepared) > 1 else prepared[0]
        if status == 0:  # hang up
            return
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if content is data else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET  # noqa: N815  # its name in the library

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # its name in the library
        """Silence."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Answers]:
    """A Saturn, told by the environment."""
    monkeypatch.setattr(saturn, "_POLL_S", 0.01)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("SATURN_TOKEN", "secret-token")
    with Answers() as answers:
        monkeypatch.setenv("SATURN_BASE_URL", answers.url)
        thread = threading.Thread(target=answers.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield answers
        answers.shutdown()
        thread.join()


def deployment(**settings: Any) -> Deployment:
    config = ClusterConfig(backend="saturn", **settings)
    record = ClusterRecord("dev", "saturn", "2026-01-01T00:00:00+00:00", settings=config.model_dump(mode="json"))
    return cluster_records.create(record)


def test_missing_package_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dask_saturn", None)
    with pytest.raises(UsageError, match=r"needs dask-saturn \(.*\): pip install 'dask-saturn>=0.4'$"):
        Saturn("https://app.saturn")


def test_url_of_the_configuration_wins_and_its_password_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SATURN_BASE_URL", "https://other")
    monkeypatch.setenv("SATURN_TOKEN", "secret-token")
    assert Saturn("https://app.saturn").url == "https://app.saturn"
    with pytest.raises(NotTaken) as caught:
        Saturn("http://me:hidden@127.0.0.1:1").status("c1")
    assert "hidden" not in str(caught.value) and "Connection refused" in str(caught.value)


def test_import_of_dask_saturn_leaves_logging_alone(server: Answers) -> None:
    before = list(logging.getLogger().handlers)
    Saturn(None)
    assert logging.getLogger().handlers == before
    assert not logging.getLogger("dask-saturn").isEnabledFor(logging.INFO)


def test_order_holds_what_is_set_and_nothing_else(server: Answers) -> None:
    server.prepared = [(200, {"id": "c1", "status": "error", "errors": ["no quota"]})]
    settings = {"worker_size": "large", "worker_is_spot": False, "nprocs": 2}
    server.prepared.insert(0, (200, {"server_options": {"size": [{"name": "large"}]}}))
    cluster = deployment(saturn=settings, ranks=5)
    with pytest.raises(ClusterError, match="Saturn can't start the cluster: no quota"):
        SaturnProvider().scale(cluster, None, print)
    order = {"n_workers": 3, "worker_size": "large", "worker_is_spot": False, "nprocs": 2}
    assert server.asked[-1] == ("POST /api/dask_clusters?is_external=true", order)
    assert cluster.record.parts == {"url": server.url, "id": "c1", "attached": False}


def test_size_that_saturn_does_not_have_is_told_before_anything_is_ordered(server: Answers) -> None:
    server.prepared = [(200, {"server_options": {"size": [{"name": "large"}, {"name": "g4dnxlarge"}]}})]
    cluster = deployment(saturn={"scheduler_size": "lagre"})
    with pytest.raises(UsageError, match=r'no machines of size "lagre" \(did you mean large\?\)'):
        SaturnProvider().scale(cluster, None, print)
    assert [call for call, _ in server.asked] == ["GET /api/dask_clusters/info"]
    assert cluster.record.parts == {}


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ((401, {"message": "Invalid token"}), UsageError, r"refuses the token in SATURN_TOKEN \(401: Invalid token\)"),
        ((403, b"<html>"), UsageError, r"refuses the token in SATURN_TOKEN \(403: Forbidden\)"),
        ((500, {"message": "No\nspace"}), NotTaken, "refuses: 500: No space$"),
        ((502, b"<html>"), NotTaken, "refuses: 502: Bad Gateway$"),
    ],
)
def test_order_that_was_not_taken_leaves_nothing_to_end(
    server: Answers, answer: tuple[int, Any], kind: type[Exception], words: str
) -> None:
    server.prepared = [answer]
    cluster = deployment()
    with pytest.raises(kind, match=words):
        SaturnProvider().scale(cluster, None, print)
    asked = len(server.asked)
    SaturnProvider().stop(cluster, print)
    assert len(server.asked) == asked


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, b"<html>Sign in</html>"), "answers with text/html instead of JSON: is SATURN_BASE_URL that of Saturn"),
        ((0, None), "has hung up without an answer"),
    ],
)
def test_order_that_may_have_been_taken_is_asked_after(server: Answers, answer: tuple[int, Any], words: str) -> None:
    server.prepared = [answer]
    cluster = deployment()
    with pytest.raises(ClusterError, match=words):
        SaturnProvider().scale(cluster, None, print)
    server.prepared = [(200, {"id": "c1", "status": "pending"}), (200, {"status": "closed"})]
    SaturnProvider().stop(cluster, print)
    assert server.asked[-2:] == [
        ("POST /api/dask_clusters?is_external=true", {"n_workers": 1, "nprocs": 1}),
        ("GET /api/dask_clusters/c1/status", None),
    ]


def ordered(cluster: Deployment, url: str) -> Deployment:
    cluster.update(parts={"url": url, "id": "c1", "attached": False})
    return cluster


def test_status_of_the_pod_counts_where_the_cluster_tells_none(server: Answers) -> None:
    server.prepared = [(502, b""), (200, {"status": "error"})]
    assert SaturnProvider().fault(ordered(deployment(), server.url)) == "its status in Saturn is error"
    assert [call for call, _ in server.asked] == ["GET /api/dask_clusters/c1/status", "GET /api/dask_clusters/c1"]


def test_cluster_that_saturn_has_forgotten_is_down(server: Answers) -> None:
    server.prepared = [(404, {"message": "Not found"})]
    cluster = ordered(deployment(), server.url)
    assert SaturnProvider().fault(cluster) == "its status in Saturn is gone"
    SaturnProvider().stop(cluster, print)
    assert all(call.startswith("GET") for call, _ in server.asked)


def test_cluster_that_saturn_does_not_close_is_told(server: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saturn, "_STOP_S", 0.1)
    server.prepared = [(200, {"status": "ready"}), (200, {}), (200, {"status": "closing"})]
    with pytest.raises(ClusterError, match=r"asked to close the cluster c1, but it is closing after 0\.1 s"):
        SaturnProvider().stop(ordered(deployment(), server.url), print)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((409, {"message": "Cluster is busy"}), "could not scale the cluster: Cluster is busy"),
        ((500, b"<"), "is not JSON"),
    ],
)
def test_what_dask_saturn_raises_becomes_one_line(server: Answers, answer: tuple[int, Any], words: str) -> None:
    server.prepared = [answer]
    with pytest.raises(ClusterError, match=words):
        Saturn(None).scale("c1", 3)
    assert server.asked == [("POST /api/dask_clusters/c1/scale", {"n": 3})]


def test_call_of_dask_saturns_that_is_never_answered_has_an_end(
    server: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    enough = threading.Event()
    monkeypatch.setattr("dask_saturn.SaturnCluster.close", lambda cluster: enough.wait(10))
    monkeypatch.setattr(saturn_api, "_CALL_S", 0.1)
    with pytest.raises(ClusterError, match=r"could not close the cluster: no answer within 0\.1 s"):
        Saturn(None).close("c1")
    enough.set()


# --- certificates that others hand out ---


def test_certificate_and_authority_of_others_are_kept_as_one(tmp_path: Path) -> None:
    ours, theirs, kept = (tmp_path / name for name in ("ours", "theirs", "kept"))
    for folder in (ours, theirs, kept):
        folder.mkdir()
    for folder in (ours, theirs):
        security.make_tls(folder)
    certificate, authority = (ours / "cert.pem").read_text(), (theirs / "cert.pem").read_text()
    given = Security(  # as texts and as a file, as Dask takes both
        tls_ca_file=authority, tls_client_cert=certificate, tls_client_key=str(ours / "key.pem")
    )
    security.keep(given, kept)
    assert (kept / "cert.pem").read_text() == certificate + authority
    assert (kept / "key.pem").read_bytes() == (ours / "key.pem").read_bytes()
    assert {oct(path.stat().st_mode)[-3:] for path in kept.iterdir()} == {"600"}
    security.own_security(kept).get_connection_args("client")  # OpenSSL takes it
    assert not security.has_expired(kept)


def test_cluster_without_tls_leaves_no_certificate(tmp_path: Path) -> None:
    security.keep(Security(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_expired_certificate_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "_VALID_DAYS", 0)
    monkeypatch.setattr(security, "_CLOCK_SKEW", dt.timedelta(days=2))
    security.make_tls(tmp_path)
    assert security.has_expired(tmp_path)


@pytest.mark.parametrize(
    ("answers", "told", "waits"),
    [
        (["ready"], ["ready"], 0),
        (["pending", "pending", "starting", "ready"], ["pending", "starting", "ready"], 3),
        (["pending"] * 8 + ["ready"], ["pending", "pending", "ready"], 8),  # once more after more than 5 s
    ],
)
def test_status_is_told_when_it_changes_and_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, answers: list[str], told: list[str], waits: int
) -> None:
    lines: list[str] = []
    slept = wait_for_saturn(monkeypatch, answers, lines)
    assert lines == [f"Saturn: {status}" for status in told] and slept == waits


def test_cluster_that_is_not_ready_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match=r"Saturn's cluster is pending after 20 s \(cluster.start_timeout_s\)"):
        wait_for_saturn(monkeypatch, ["pending"] * 40, [])
    wait_for_saturn(monkeypatch, [*["pending"] * 21, "ready"], [])  # ready just after the time is good enough


def wait_for_saturn(monkeypatch: pytest.MonkeyPatch, answers: list[str], lines: list[str]) -> int:
    """Wait for a cluster with these states, one a second; return how often it slept."""
    left, sleeps = list(answers), list[float]()
    clock = SimpleNamespace(monotonic=lambda: 100.0 + len(sleeps), sleep=sleeps.append)
    monkeypatch.setattr(saturn, "time", clock)
    monkeypatch.setattr(saturn, "_begin", lambda *_: left.pop(0))
    monkeypatch.setattr(saturn, "_asked", lambda *_: left.pop(0))
    cluster: Any = SimpleNamespace(record=SimpleNamespace(settings={"start_timeout_s": 20}))
    api: Any = SimpleNamespace(order=lambda order: order)
    saturn._await_ready(cluster, api, {}, lines.append)
    return len(sleeps)
