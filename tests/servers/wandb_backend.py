"""A stub of the W&B backend on loopback, for tests: it remembers what wandb sends, and breaks on demand.

Lead a client to it with `backend.environment`. What it answers is what wandb 0.31 was seen to need: runs are upserted
by name, rows and exit codes come through file_stream, files and artifacts through URLs that it hands out.
"""

from __future__ import annotations

import base64
import json
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Literal
from urllib.parse import quote, unquote

from tests.servers.wandb_runs import ENTITY, Artifact, Record, Run, Stream

API_KEY = "5tub" * 10  # wandb takes no key of another length than 40

Fault = Literal["", "unauthorized", "broken", "hang"]
_STATUS = {"unauthorized": 401, "broken": 500}
_LOOK_S = 0.02


class Backend:
    """The backend that is up; its attributes may be read and `fault` set at any time."""

    def __init__(self) -> None:
        self.fault: Fault = ""
        self.faults: dict[str, Fault] = {}  # for runs whose id or name ends with the key
        self.held = ""  # an operation of GraphQL that is not answered for as long as its name stands here
        self.runs: dict[str, Run] = {}
        self.artifacts: dict[str, Artifact] = {}
        self.keys: set[str] = set()
        self.asked: list[str] = []  # operations of GraphQL, and paths, in the order in which they came
        self.unknown: set[str] = set()  # operations that it does not know
        self.mistakes: list[str] = []  # exceptions of the stub itself
        self._rows_to_live: int | None = None
        self._lock = threading.RLock()
        self.stopped = threading.Event()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        """What WANDB_BASE_URL is to be."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead wandb to it, and nowhere else."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": API_KEY, "WANDB_ERROR_REPORTING": "false"}

    @property
    def run(self) -> Run:
        """The one run that there is."""
        (run,) = self.runs.values()
        return run

    def artifact(self, name: str) -> Artifact:
        """The newest artifact of this name."""
        found = [artifact for artifact in self.artifacts.values() if artifact.name == name]
        assert found, f"no {name}, there are {[artifact.name for artifact in self.artifacts.values()]}"
        return found[-1]

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def die(self) -> None:
        """Be gone in the middle of everything: nobody listens, and no connection lives on."""
        if not self.stopped.is_set():
            self.stopped.set()
            self._server.close_all()

    def die_after(self, rows: int) -> None:
        """Die instead of answering the request that brings this many rows of all runs together; 0: the first stream."""
        self._rows_to_live = rows

    # --- what the handler calls ---

    def fault_for(self, path: str, body: bytes) -> Fault:
        """How a request fails: as all do, or as those of its run."""
        variables = json.loads(body).get("variables") or {} if self.faults and path == "/graphql" else {}
        names = [str(variables.get(key) or "") for key in ("name", "displayName", "run")]
        found = [fault for end, fault in self.faults.items() if any(name.endswith(end) for name in [*names, path])]
        return self.fault or (found or [""])[0]

    def wait_for_turn(self, path: str, body: bytes) -> None:
        """Return once the request may be answered."""
        while path == "/graphql" and self.held == _operation(json.loads(body)) and not self.stopped.is_set():
            time.sleep(_LOOK_S)

    def answer(self, path: str, client: str, body: bytes) -> Record:
        """What wandb gets for a request; only in shared mode it says which `client` it is."""
        with self._lock:
            if path == "/graphql":
                return {"data": self._graphql(json.loads(body), client)}
            self.asked.append(path)
            kind, *words = [unquote(word) for word in path.strip("/").split("/")]
            if kind == "files" and words[-1:] == ["file_stream"]:
                return self._file_stream(words[1], words[2], client, json.loads(body))
            if kind == "upload":
                self._upload(*words, body=body)
            else:
                self.unknown.add(path)
            return {}

    def _graphql(self, request: Record, client: str) -> Record:
        operation = _operation(request)
        self.asked.append(operation)
        variables = request.get("variables") or {}
        handler = self._ANSWERS.get(operation)
        if handler is None:
            self.unknown.add(operation)
            return dict.fromkeys(_top_fields(request["query"]))  # null: it has nothing of the kind
        answer: Record = handler(self, {**variables, **variables.get("input", {}), "client": client})
        return answer

    def _viewer(self, _: Record) -> Record:
        teams = {"edges": [{"node": {"name": ENTITY}}]}
        who = {"id": "viewer", "entity": ENTITY, "username": "stub", "email": "stub@localhost", "flags": "{}"}
        return {"viewer": {**who, "teams": teams}}

    def _server_features(self, _: Record) -> Record:
        return {"serverInfo": {"features": []}}

    def _upsert_bucket(self, given: Record) -> Record:
        known = {f"bucket-{run.id}": run.id for run in self.runs.values()}
        run_id = given.get("name") or known[given["id"]]
        inserted = run_id not in self.runs
        run = self.runs.setdefault(run_id, Run(run_id, given.get("project") or "uncategorized"))
        run.upsert(given, given["client"])
        return {"upsertBucket": {"bucket": run.bucket(), "inserted": inserted}}

    def _run_resume_status(self, given: Record) -> Record:
        run = self.runs.get(given["name"])
        model = {"id": "project", "name": given["project"], "entity": {"id": "entity", "name": ENTITY}}
        return {"model": {**model, "bucket": run.bucket() if run else None}}

    def _create_run_files(self, given: Record) -> Record:
        files = [{"name": name, "uploadUrl": self._upload_url("run", given["run"], name)} for name in given["files"]]
        return {"createRunFiles": {"runID": f"bucket-{given['run']}", "uploadHeaders": [], "files": files}}

    def _create_artifact(self, given: Record) -> Record:
        """An artifact with the files of an earlier one is that one; an alias leaves the artifact that had it."""
        aliases = [alias["alias"] for alias in given.get("aliases") or ()]
        type_name, name, digest = given["artifactTypeName"], given["artifactCollectionName"], given["digest"]
        family = [each for each in self.artifacts.values() if (each.type, each.name) == (type_name, name)]
        for each in family:
            each.aliases = [alias for alias in each.aliases if alias not in aliases]
        same = [each for each in family if each.digest == digest] if given.get("enableDigestDeduplication") else []
        if same:
            artifact = same[0]
            artifact.aliases += aliases
        else:
            artifact_id = f"artifact-{len(self.artifacts)}"
            metadata = json.loads(given.get("metadata") or "{}")
            artifact = Artifact(artifact_id, given["runName"], type_name, name, aliases, digest, metadata)
            self.artifacts[artifact_id] = artifact
        made = {"id": artifact.id, "state": artifact.state, "artifactSequence": {"latestArtifact": None}}
        return {"createArtifact": {"artifact": made}}

    def _artifact_manifest(self, given: Record) -> Record:
        # The id of a manifest is that of its artifact.
        artifact_id = given.get("artifactID") or given["artifactManifestID"]
        url = self._upload_url("manifest", artifact_id, given.get("name") or "wandb_manifest.json")
        made = {"id": artifact_id, "file": {"id": artifact_id, "uploadUrl": url, "uploadHeaders": []}}
        return {key: {"artifactManifest": made} for key in ("createArtifactManifest", "updateArtifactManifest")}

    def _create_artifact_files(self, given: Record) -> Record:
        nodes = [
            {
                "storagePath": file["name"],
                "uploadUrl": self._upload_url("artifact", file["artifactID"], file["name"]),
                "uploadHeaders": [],
                "uploadMultipartUrls": None,
                "artifact": {"id": file["artifactID"]},
            }
            for file in given["artifactFiles"]
        ]
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}

    def _commit_artifact(self, given: Record) -> Record:
        self.artifacts[given["artifactID"]].state = "COMMITTED"
        return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": "digest"}}}

    def _artifact_by_id(self, given: Record) -> Record:
        artifact = self.artifacts[given["id"]]
        project = {"id": "project", "internalId": "1", "name": "project", "entity": {"id": "entity", "name": ENTITY}}
        sequence = {"__typename": "ArtifactSequence", "id": "sequence", "name": artifact.name, "project": project}
        about = {"id": artifact.id, "state": artifact.state, "digest": artifact.digest, "size": 0, "fileCount": 1}
        about |= {"artifactSequence": sequence, "versionIndex": 0, "artifactType": {"name": artifact.type}}
        about |= {"metadata": json.dumps(artifact.metadata), "ttlDurationSeconds": -2, "ttlIsInherited": True}
        about |= {"tags": [], "createdAt": "2026-01-01T00:00:00", "aliases": [], "__typename": "Artifact"}
        nothing = ("description", "historyStep", "commitHash", "updatedAt", "digestAlgorithm")
        return {"artifact": {**about, **dict.fromkeys(nothing)}}

    def _nothing(self, given: Record) -> Record:
        return {"entity": None, "organization": None, "project": None, "artifact": None}

    _ANSWERS: ClassVar = {
        "Viewer": _viewer,
        "ServerFeaturesQuery": _server_features,
        "UpsertBucket": _upsert_bucket,
        "RunResumeStatus": _run_resume_status,
        "CreateRunFiles": _create_run_files,
        "CreateArtifact": _create_artifact,
        "CreateArtifactManifest": _artifact_manifest,
        "UpdateArtifactManifest": _artifact_manifest,
        "CreateArtifactFiles": _create_artifact_files,
        "CommitArtifact": _commit_artifact,
        "ArtifactByID": _artifact_by_id,
        "ArtifactType": _nothing,
        "FetchArtifactDigestAlgorithm": _nothing,
        "FetchOrgEntityFromEntity": _nothing,
        "OrgFeatureFlags": _nothing,
        "OrganizationCoreWeaveOrganizationID": _nothing,
        "XXHashDigestsEnabled": _nothing,
    }

    def _file_stream(self, project: str, run_id: str, client: str, sent: Record) -> Record:
        run = self.runs.setdefault(run_id, Run(run_id, project))
        stream = run.clients.setdefault(client, Stream())
        stream.take(sent.get("files") or {})
        if sent.get("complete"):
            stream.exits.append(sent.get("exitcode", 0))
        if self._rows_to_live is not None and sum(len(run.history) for run in self.runs.values()) >= self._rows_to_live:
            self.die()
        return {"limits": {}}

    def _upload_url(self, kind: str, owner: str, name: str) -> str:
        return f"{self.url}/upload/{kind}/{quote(owner, safe='')}/{quote(name, safe='')}"

    def _upload(self, kind: str, owner: str, name: str, *, body: bytes) -> None:
        if kind == "run":
            self.runs[owner].files[name] = body
        elif kind == "manifest":
            self.artifacts[owner].manifest = json.loads(body)
        else:
            self.artifacts[owner].files[name] = body


def _operation(request: Record) -> str:
    """The name of what a request of GraphQL asks for."""
    found = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
    return found[1] if found else "anonymous"


def _top_fields(query: str) -> list[str]:
    """The fields that a query asks for at its top, under the names that the answer is to have them."""
    inside = re.sub(r"\((?:[^()]|\([^()]*\))*\)", "", query).partition("{")[2]
    depth, fields = 1, []
    for token in re.findall(r"[{}]|\w+\s*:?", inside):
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth == 0:
            break
        if depth == 1 and token not in "{}":
            fields.append(token)
    return [name.rstrip(": ") for name, before in zip(fields, ["", *fields], strict=False) if not before.endswith(":")]


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *args: object) -> None:
        """Nothing is said on stderr: requests are remembered."""

    def _handle(self) -> None:
        backend = self.server.backend
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = backend.fault_for(self.path, body)
        if fault == "hang":
            backend.stopped.wait()
        backend.wait_for_turn(self.path, body)
        answer: Record = {"errors": [{"message": f"it is {fault}"}]}
        status = _STATUS.get(fault, 200)
        if status == 200:
            backend.keys |= {self._key()} - {""}
            client = self.headers.get("X-Wandb-Async-Client-Id") or self.headers.get("X-Wandb-Client-Id") or ""
            answer = backend.answer(self.path, client, body)
        if backend.stopped.is_set():
            self.close_connection = True
            return
        self._send(status, json.dumps(answer).encode())

    do_GET = do_POST = do_PUT = _handle  # noqa: N815 - the base class looks for these names

    def _key(self) -> str:
        """The API key: the password of the basic authorization."""
        encoded = self.headers.get("Authorization", "").removeprefix("Basic ")
        return base64.b64decode(encoded).decode().partition(":")[2]

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    """Knows its connections, so that it can drop them all."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, backend: Backend) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.backend = backend
        self.connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go are nothing to tell of; anything else is a mistake of this stub."""
        if not isinstance(sys.exception(), OSError):
            self.backend.mistakes.append(traceback.format_exc())

    def close_all(self) -> None:
        """Stop listening, and reset every connection."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # close alone leaves it listening while another thread polls it
        self.socket.close()
        threading.Thread(target=self.shutdown, daemon=True).start()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def wandb_backend() -> Iterator[Backend]:
    """A backend that is up until the block is left."""
    backend = Backend()
    backend.start()
    try:
        yield backend
    finally:
        backend.die()
    assert not backend.mistakes, "".join(backend.mistakes)
