"""A Kubernetes API server on loopback, for tests, with TLS and a token: objects and logs, as kubectl needs them.

Pods are run by `kube_node`. What it does not know is answered as a real server would: with 404. A port-forward needs
SPDY, which it does not speak: `kubectl_here` in test_kubernetes.py forwards by itself, and passes all else to kubectl.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import json
import ssl
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import yaml
from aiohttp import web

from tests.servers.kube_store import Object, Refusal, Store, check_schema

TOKEN = "let-me-in"
T = TypeVar("T")

# (group, version) -> plural: kind
KINDS: dict[tuple[str, str], dict[str, str]] = {
    ("", "v1"): {
        "events": "Event",
        "namespaces": "Namespace",
        "pods": "Pod",
        "secrets": "Secret",
        "services": "Service",
    },
    ("batch", "v1"): {"jobs": "Job"},
}
_CLUSTER_WIDE = {"namespaces"}


class Node(Protocol):
    """Who runs pods."""

    def changed(self, plural: str, event: str, thing: Object) -> None: ...

    def log(self, pod: str, *, previous: bool) -> str | None: ...

    async def close(self) -> None: ...

    faults: list[str]


@dataclass(slots=True)
class Call:
    """A request that has come."""

    method: str
    path: str
    query: dict[str, str]
    agent: str


class KubeServer:
    """The API server, in a thread of its own; `with` starts and ends it, and the pods with it."""

    def __init__(self, folder: Path, node: Callable[[Store, Path], Node]) -> None:
        self.folder = folder
        self.calls: list[Call] = []
        self.forbidden: set[tuple[str, str]] = set()  # (method, plural)
        self._faults: list[str] = []
        self.url = ""
        self._make_node = node
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="kube-server", daemon=True)
        self._streams: set[asyncio.Task[Any]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    @property
    def faults(self) -> list[str]:
        """Those of the server and of the node themselves: there must be none."""
        return [*self._faults, *self.node.faults]

    def kubeconfig(self, name: str = "kubeconfig", *, token: str = TOKEN, inline: bool = False) -> Path:
        """A file for KUBECONFIG, with two contexts; the current one's namespace is ml, the other one's is other."""
        authority = {"certificate-authority": str(self.folder / "ca")}
        if inline:
            authority = {"certificate-authority-data": base64.b64encode((self.folder / "ca").read_bytes()).decode()}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test-context",
            "clusters": [{"name": "k", "cluster": {"server": self.url, **authority}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [
                {"name": "test-context", "context": {"cluster": "k", "user": "u", "namespace": "ml"}},
                {"name": "other-context", "context": {"cluster": "k", "user": "u", "namespace": "other"}},
            ],
        }
        path = self.folder / name
        path.write_text(yaml.safe_dump(config))
        return path

    def objects(self, plural: str) -> list[Object]:
        """What there is of a kind now."""
        return self._do(lambda: json.loads(json.dumps(self.store.find(plural, "", {}))))

    def clear(self, plural: str) -> None:
        """Delete all objects of a kind, and what belongs to them."""

        def delete() -> None:
            for thing in self.store.find(plural, "", {}):
                if self.store.has(plural, thing):
                    self.store.delete(plural, thing)

        self._do(delete)

    def _do(self, what: Callable[[], T]) -> T:
        """What a function returns that the server's thread calls."""

        async def call() -> T:
            return what()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(60)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.store = Store()
        node = self._make_node(self.store, self.folder)
        self.store.listener = node.changed
        self.node = node
        for namespace in ("ml", "other"):
            self.store.create("namespaces", "", {"metadata": {"name": namespace}})
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=_certificate(self.folder))
        await site.start()
        self.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stop.wait()
        for stream in self._streams:
            stream.cancel()
        await node.close()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        call = Call(request.method, request.path, dict(request.query), request.headers.get("User-Agent", ""))
        self.calls.append(call)
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response(Refusal(401, "Unauthorized", "Unauthorized").status(), status=401)
        path = request.path.rstrip("/")
        if path == "/version":
            return web.json_response({"gitVersion": "v1.33.0", "major": "1", "minor": "33"})
        try:
            return self._discovery(path) or await self._resource(request)
        except Refusal as refusal:
            return web.json_response(refusal.status(), status=refusal.code)
        except (ConnectionError, ssl.SSLError):
            raise  # the client went away
        except Exception:
            self._faults.append(f"{request.method} {request.path}: {traceback.format_exc()}")
            raise

    def _discovery(self, path: str) -> web.Response | None:
        if path == "/api":
            return web.json_response({"kind": "APIVersions", "versions": ["v1"]})
        if path == "/apis":
            groups = []
            for group, version in (key for key in KINDS if key[0]):
                known = {"groupVersion": f"{group}/{version}", "version": version}
                groups.append({"name": group, "versions": [known], "preferredVersion": known})
            return web.json_response({"kind": "APIGroupList", "groups": groups})
        if path == "/openapi/v2":  # kubectl before 1.27 compares with it: an empty document, in protobuf
            return web.Response(body=b"\x0a\x032.0", content_type="application/octet-stream")
        if path == "/openapi/v3":  # later ones ask it whether the server validates fields
            places = [f"apis/{group}/{version}" if group else f"api/{version}" for group, version in KINDS]
            return web.json_response(
                {"paths": {place: {"serverRelativeURL": f"/openapi/v3/{place}"} for place in places}}
            )
        for (group, version), kinds in KINDS.items():
            if path == (f"/openapi/v3/apis/{group}/{version}" if group else f"/openapi/v3/api/{version}"):
                parameter = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
                paths = {
                    f"/{plural}/{{name}}": {
                        "patch": {
                            "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind},
                            "parameters": [parameter],
                        }
                    }
                    for plural, kind in kinds.items()
                }
                about = {"title": "Kubernetes", "version": "v1.33.0"}
                return web.json_response({"openapi": "3.0.0", "info": about, "paths": paths})
            if path == (f"/apis/{group}/{version}" if group else f"/api/{version}"):
                verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
                resources = [
                    {"name": plural, "singularName": kind.lower(), "kind": kind, "verbs": verbs}
                    | {"namespaced": plural not in _CLUSTER_WIDE}
                    for plural, kind in kinds.items()
                ]
                return web.json_response({"kind": "APIResourceList", "resources": resources})
        return None

    async def _resource(self, request: web.Request) -> web.StreamResponse:
        group, version, rest = _parsed(request.path)
        namespace = ""
        if len(rest) > 2 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        kinds = KINDS.get((group, version), {})
        if not rest or rest[0] not in kinds:
            return web.Response(status=404, text="404 page not found\n")
        plural, name, part = [*rest, "", ""][:3]
        if (request.method, plural) in self.forbidden:
            raise Refusal(403, "Forbidden", f'{plural} is forbidden: User "u" cannot {request.method.lower()} it')
        if part == "log":
            return self._log(name, request)
        if request.method == "GET" and not name:
            return await self._list(plural, kinds[plural], f"{group}/{version}".strip("/"), namespace, request)
        return await self._one(plural, namespace, name, request)

    async def _one(self, plural: str, namespace: str, name: str, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.text() or "{}")
        if request.method == "POST":
            check_schema(body)
            return web.json_response(self.store.create(plural, namespace, body), status=201)
        thing = self.store.named(plural, namespace, name)
        if request.method == "PATCH":
            return web.json_response(self.store.patch(plural, namespace, name, body))
        if request.method == "DELETE":
            return web.json_response(self.store.delete(plural, thing))
        return web.json_response(thing)

    async def _list(
        self, plural: str, kind: str, version: str, namespace: str, request: web.Request
    ) -> web.StreamResponse:
        if not _is_watch(request):
            items = self.store.find(plural, namespace, request.query)
            meta = {"resourceVersion": str(self.store.version)}
            return web.json_response({"kind": f"{kind}List", "apiVersion": version, "metadata": meta, "items": items})
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        with self._stream(), contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", "600"))):
                async for event in self.store.watch(plural, namespace, request.query):
                    await answer.write(json.dumps(event).encode() + b"\n")
        return answer

    def _log(self, pod: str, request: web.Request) -> web.Response:
        said = self.node.log(pod, previous=request.query.get("previous") == "true")
        if said is None:
            raise Refusal(400, "BadRequest", f'container in pod "{pod}" is waiting to start: ContainerCreating')
        lines = said.splitlines()[-int(request.query.get("tailLines", "1000000")) :]
        return web.Response(text="\n".join(lines) + "\n")

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            yield
        except asyncio.CancelledError:
            pass  # the server ends
        finally:
            self._streams.discard(task)


def _is_watch(request: web.Request) -> bool:
    return request.query.get("watch") in {"true", "1"}


def _parsed(path: str) -> tuple[str, str, list[str]]:
    """Group, version, and what comes after."""
    parts = path.strip("/").split("/")
    if parts[0] == "api":
        return "", [*parts, ""][1], parts[2:]
    return [*parts, ""][1], [*parts, "", ""][2], parts[3:]


def _certificate(folder: Path) -> ssl.SSLContext:
    """A certificate for 127.0.0.1, which is its own authority, in the file `ca`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kube-server")])
    now = datetime.now(UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "ca").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "ca-key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca", folder / "ca-key")
    return context
