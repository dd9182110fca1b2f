"""A Saturn on loopback: the endpoints that dask-saturn 0.4 calls, with a real scheduler and workers behind them."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

TOKEN = "saturn-token-of-the-tests"
SIZES = ("medium", "large", "g4dnxlarge")
_ID = "c1d2e3"
_LOOPBACK = "127.0.0.1"
_GRACE_S = 2.0  # a worker whose scheduler has gone first takes longer


class Authority:
    """The certificate authority of one Dask cluster."""

    def __init__(self, folder: Path) -> None:
        self.term = dt.timedelta(days=1)
        self.signed = 0
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Saturn's Dask cluster")])
        self.certificate = self._sign(self._name, self.key.public_key(), is_authority=True)
        self.ca_file, self.cert_file, self.key_file = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "scheduler and workers")])
        self.ca_file.write_bytes(_pem(self.certificate))
        self.cert_file.write_bytes(_pem(self._sign(name, key.public_key())))
        self.key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )

    def answer(self, request: bytes) -> bytes:
        """The signed certificate and the authority's own, as Saturn answers a CSR."""
        self.signed += 1
        asked = x509.load_pem_x509_csr(request)
        public_key = asked.public_key()
        assert isinstance(public_key, rsa.RSAPublicKey)
        return _pem(self._sign(asked.subject, public_key)) + _pem(self.certificate)

    def _sign(self, name: x509.Name, key: rsa.RSAPublicKey, *, is_authority: bool = False) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + self.term)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .add_extension(_usage(is_authority=is_authority), critical=True)
            .sign(self.key, hashes.SHA256())
        )


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    """Python 3.13 asks authorities for it."""
    return x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=not is_authority,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


@dataclass
class DaskCluster:
    """Scheduler and workers of their own, as processes."""

    folder: Path
    authority: Authority
    nthreads: int = 1
    scheduler: subprocess.Popen[bytes] | None = None
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def _scheduler_file(self) -> Path:
        return self.folder / "scheduler.json"

    def start(self, workers: int) -> None:
        self._scheduler_file.unlink(missing_ok=True)
        self.scheduler = self._run(
            "scheduler", "--scheduler-file", self._scheduler_file, "--protocol", "tls", "--port", "0"
        )
        self.scale(workers)

    def scale(self, workers: int) -> None:
        while len(self.workers) < workers:
            number = ("--nthreads", str(self.nthreads), "--no-nanny", "--local-directory", self.folder)
            self.workers.append(self._run("worker", "--scheduler-file", self._scheduler_file, *number))
        _end(self.workers[workers:])
        del self.workers[workers:]

    def info(self) -> dict[str, Any] | None:
        """What the scheduler has written into its file, None until it has."""
        with contextlib.suppress(OSError, ValueError):
            told: dict[str, Any] = json.loads(self._scheduler_file.read_text())
            return told
        return None

    def close(self) -> None:
        _end([*self.workers, *([self.scheduler] if self.scheduler else [])])
        self.workers.clear()
        self.scheduler = None

    def _run(self, program: str, *options: str | Path) -> subprocess.Popen[bytes]:
        tls = self.authority
        files = ("--tls-ca-file", tls.ca_file, "--tls-cert", tls.cert_file, "--tls-key", tls.key_file)
        command = [sys.executable, "-m", f"distributed.cli.dask_{program}", "--host", _LOOPBACK, "--no-dashboard"]
        command += ["--dashboard-address", f"{_LOOPBACK}:0"]  # port 8787 belongs to tests of Kubernetes
        with (self.folder / f"{program}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, *map(str, files), *map(str, options)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class SaturnServer(ThreadingHTTPServer):
    """One resource of Saturn's, with its one Dask cluster; a test may change what it answers."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__((_LOOPBACK, 0), _Handler)
        folder.mkdir(parents=True, exist_ok=True)
        self.url = f"http://{_LOOPBACK}:{self.server_address[1]}"
        self.dask = DaskCluster(folder, Authority(folder))
        self.status = "stopped"
        self.config: dict[str, Any] = {}
        self.calls: list[str] = []
        self.errors: list[str] = []  # why it can't start the cluster
        self.never_ready = False
        self.id_at_once = True  # else only once it is ready
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
        self.dask.close()

    @property
    def env(self) -> dict[str, str]:
        """What a user of it has in the environment."""
        return {"SATURN_BASE_URL": self.url, "SATURN_TOKEN": TOKEN}

    def post_clusters(self, body: bytes) -> tuple[int, Any]:
        """The first one starts it, the others only ask; as Saturn, it warns who asks for something else meanwhile."""
        with self._lock:
            answer: dict[str, Any] = {"id": _ID} if self.id_at_once else {}
            if self.errors:
                self.status = "error"
                return 200, {**answer, "status": "error", "errors": self.errors}
            config = json.loads(body)
            if self.status in ("stopped", "closed", "error"):
                self.status, self.config = "pending", config
                self.dask.nthreads = config.get("nthreads", 1)
                self.dask.start(config.get("n_workers", 1) * config.get("nprocs", 1))
            elif self.status == "pending" and self.dask.info() and not self.never_ready:
                self.status = "ready"
            if self.status == "ready":
                answer["id"] = _ID
            differs = [] if config == self.config else ["The cluster is running: its settings can't be changed."]
            return 200, {**answer, "status": self.status, "warnings": differs, "errors": []}

    def get_clusters_info(self) -> tuple[int, Any]:
        return 200, {"server_options": {"size": [{"name": name, "display": name.title()} for name in SIZES]}}

    def get_info(self) -> tuple[int, Any]:
        told = self.dask.info()
        if self.status != "ready" or told is None:
            return 409, {"message": "Cluster is not ready"}
        return 200, {"scheduler_address": told["address"], "dashboard_link": f"{self.url}/dashboard/{_ID}"}

    def get_scheduler_info(self) -> tuple[int, Any]:
        if self.status != "ready":
            return 409, {"message": "Cluster is not ready"}
        workers: dict[str, Any] = {f"worker-{number}": {} for number, _ in enumerate(self.dask.workers)}
        return 200, {"type": "Scheduler", "id": "", "address": "", "services": {}, "workers": workers}

    def get_status(self) -> tuple[int, Any]:
        return 200, {"status": self.status}

    def post_scale(self, body: bytes) -> tuple[int, Any]:
        with self._lock:
            self.dask.scale(json.loads(body)["n"] * self.config.get("nprocs", 1))
        return 200, {}

    def post_close(self) -> tuple[int, Any]:
        with self._lock:
            self.status = "closing"
        threading.Thread(target=self._close).start()
        return 200, {}

    def _close(self) -> None:
        with self._lock:
            self.dask.close()
            self.status = "closed"

    def post_csr(self, body: bytes) -> tuple[int, Any]:
        return 200, self.dask.authority.answer(body)


class _Handler(BaseHTTPRequestHandler):
    server: SaturnServer

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # its name in the library
        """Silence: the calls stand in the server's list."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path).path.removeprefix("/api/dask_clusters")
        self.server.calls.append(f"{self.command} {self.path}")
        if self.headers.get("Authorization") != f"token {TOKEN}":
            status, data = 401, {"message": "Invalid token"}
        elif path == "":
            status, data = self.server.post_clusters(body)
        elif path == "/info":
            status, data = self.server.get_clusters_info()
        elif call := re.fullmatch(rf"/{_ID}(/(\w+))?", path):
            status, data = self._of_cluster(call[2] or "status", body)
        else:
            status, data = 404, {"message": "Not found"}
        self._send(status, data)

    def _of_cluster(self, name: str, body: bytes) -> tuple[int, Any]:
        answer = getattr(self.server, f"{self.command.lower()}_{name}")
        result: tuple[int, Any] = answer(body) if name in ("scale", "csr") else answer()
        return result

    def _send(self, status: int, data: Any) -> None:
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-pem-file" if content is data else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
