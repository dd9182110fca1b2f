"""Records of this user's clusters: one private folder for each in the user's state directory, with cluster.json."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddptrain.clusters.processes import Relation, is_loopback, relation, running, where_to_run
from ddptrain.clusters.security import CERT_FILE, write_private_json
from ddptrain.config.sections.clusters import ClusterConfig
from ddptrain.config.types import NAME_PATTERN
from ddptrain.config.wording import did_you_mean, shorten
from ddptrain.errors import ClusterError, UsageError, one_line
from ddptrain.file_ops import is_at, make_private, try_lock
from ddptrain.host_identity import HostId, this_host
from ddptrain.version import __version__

_RECORD = "cluster.json"
_LOCK_PATIENCE_S = 1.0  # `is_locked` in another process holds the lock for a moment


class ClusterNotFound(UsageError):
    """No cluster of this user has that name."""


class Part(BaseModel):
    """Something that a backend has started: a process, a job, the objects of a Kubernetes cluster.

    `host` is the name of its host in the cluster. `id` is what finds it there: a job, a label, the folder of a process.
    `log` is the name of its log, `pid` the id of the process on its host, if it is one and has started.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    role: str
    host: str = ""
    id: str = ""
    log: str = ""
    pid: int | None = None

    @property
    def name(self) -> str:
        """The name for messages and logs: scheduler, worker node-1."""
        return f"{self.role} {self.host}" if self.host and self.role != "scheduler" else self.role


def ended(parts: Iterable[Part]) -> str | None:
    """Return which of these parts was a process of this host that has ended; None if all run. Raises ClusterError."""
    known = [part for part in parts if part.pid is not None]
    alive = {folder: running(folder) for folder in {part.id for part in known}}
    gone = (f"the {part.name} (pid {part.pid}) has ended" for part in known if part.pid not in alive[part.id])
    return next(gone, None)


class ClusterRecord(BaseModel):
    """One cluster: its configuration and its parts.

    `workers` is the number that was started, `version` the version of ddptrain that started it, `host` the host of its
    local processes or of the command that started it. `shared` is a folder for the files of its scheduler, if they are
    not in `folder`. `problem` says why the record can't be read, or is "".
    """

    model_config = ConfigDict(defer_build=True)  # 15 ms, and a run with an embedded cluster reads no record

    name: str
    config: ClusterConfig = Field(default_factory=ClusterConfig, repr=False)
    started_at: str = ""
    address: str = ""
    workers: int = 0
    version: str = __version__
    host: HostId = HostId()
    shared: str = ""
    parts: list[Part] = Field(default_factory=list)
    problem: str = Field(default="", exclude=True)

    @property
    def folder(self) -> Path:
        """The cluster's own folder, with its record and its keys."""
        return clusters_dir() / self.name

    @property
    def backend(self) -> str:
        """The name of its backend; "?" if the record can't be read."""
        return "?" if self.problem else self.config.backend

    @property
    def tls_dir(self) -> Path | None:
        """The folder with the cluster's cert.pem and key.pem, or None for a cluster without TLS."""
        return self.folder if (self.folder / CERT_FILE).exists() else None

    @property
    def relation(self) -> Relation:
        """Whether this host can use the cluster: SAME if its scheduler listens on a network."""
        address = urlsplit(self.address)
        only_there = self.backend == "local" or is_loopback(address.hostname or "")
        return relation(self.host, this_host()) if only_there else Relation.SAME

    @property
    def elsewhere(self) -> str:
        """The host on which to run commands for this cluster; "" for this host."""
        return where_to_run(self.host, this_host()) if self.relation == Relation.OTHER else ""

    def check_here(self, hint: str = "") -> None:
        """Raise ClusterError, with the `hint`, on a host that can neither use nor end the cluster."""
        if where := self.elsewhere:
            raise ClusterError(f"the cluster {self.name} runs on {where}{'; ' if hint else ''}{hint}")

    def of_role(self, role: str) -> list[Part]:
        """Return the parts with that role, in the order of their start."""
        return [part for part in self.parts if part.role == role]

    def keep(self, part: Part) -> None:
        """Save a part, in the place of the one with the same role and host, if there is one."""
        for place, known in enumerate(self.parts):
            if (known.role, known.host) == (part.role, part.host):
                self.parts[place] = part
                break
        else:
            self.parts.append(part)
        self.save()

    def save(self, folder: Path | None = None) -> None:
        """Write the record, by default into the cluster's folder; a reader sees the old content or the new one."""
        # Defaults are left out, so that another version can read what it has in common with this one.
        content = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        write_private_json((folder or self.folder) / _RECORD, {**content, "version": self.version}, indent=1)

    def read_address(self) -> Self:
        """Take the address from the file of a scheduler that listens meanwhile; return the record."""
        if not self.address and (written := self.written("scheduler.json")):
            self.address = str(written.get("address", ""))
        return self

    def remove(self) -> None:
        """Delete the folder of the cluster, with its keys."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def written(self, name: str) -> dict[str, Any]:
        """Return what the scheduler has written into scheduler.json, or into ended.json at its end; {} if nothing."""
        try:
            data = json.loads((Path(self.shared or self.folder) / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}


def clusters_dir() -> Path:
    """Return the folder of all clusters, created with mode 0700. Raises ClusterError."""
    from platformdirs import user_state_path

    folder = user_state_path("ddptrain", appauthor=False) / "clusters"
    try:
        make_private(folder)
        folder.chmod(0o700)
    except OSError as error:
        raise ClusterError(
            f"the folder for clusters {folder} can't be created: {error.strerror}; set XDG_STATE_HOME to another one"
        ) from error
    return folder


def create(record: ClusterRecord) -> ClusterRecord:
    """Create a cluster's folder here; the caller has locked the name. Raises UsageError if it exists or is wrong."""
    _check_name(record.name)
    record.host = this_host()
    if _load(record.name) is not None:
        raise UsageError(f"there is a cluster {record.name} already: ddptrain cluster down {record.name} ends it")
    new = clusters_dir() / f".{record.name}.new"  # so that there is no folder without a record
    try:
        for left in (new, record.folder):
            shutil.rmtree(left, ignore_errors=True)
        new.mkdir(mode=0o700)
        record.save(new)
        new.rename(record.folder)
    except OSError as error:
        raise ClusterError(f"the cluster's folder {error.filename} can't be written: {error.strerror}") from error
    return record


def every() -> list[ClusterRecord]:
    """Return all clusters of this user, by name."""
    names = sorted(path.name for path in clusters_dir().iterdir() if re.fullmatch(NAME_PATTERN, path.name))
    return [record for name in names if (record := _load(name))]


def find(name: str) -> ClusterRecord:
    """Return the cluster of that name.

    Raises:
        ClusterNotFound: there is none; the message has the most similar name.
        ClusterError: its record can't be read.
    """
    record = _load(name) if re.fullmatch(NAME_PATTERN, name) else None
    if record is None:
        hint = did_you_mean(name, [each.name for each in every()])
        hint = hint or f"start it: ddptrain cluster up --name {shorten(name)}"
        raise ClusterNotFound(f'there is no cluster "{shorten(name)}" ({hint})')
    if record.problem:
        raise ClusterError(
            f"{record.problem}; end its processes yourself, then forget it: rm -r {shlex.quote(str(record.folder))}"
        )
    return record


@contextlib.contextmanager
def locked(name: str, patience_s: float = _LOCK_PATIENCE_S) -> Iterator[None]:
    """Lock a name against other commands. Raises UsageError after `patience_s`, or if it is not allowed.

    The lock file is deleted with the cluster: each run with a cluster of its own has another name.
    """
    _check_name(name)
    lock = _lock_file(name)
    deadline = time.monotonic() + patience_s
    while (descriptor := _take(lock)) is None:
        if time.monotonic() > deadline:
            raise UsageError(f"another command is starting or ending the cluster {name}: wait for it")
        time.sleep(0.02)
    try:
        yield
    finally:
        if not (clusters_dir() / name).exists():
            lock.unlink(missing_ok=True)
        os.close(descriptor)


def is_locked(name: str) -> bool:
    """Return whether a command is starting or ending the cluster now."""
    try:
        descriptor = os.open(_lock_file(name), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)


def _take(lock: Path) -> int | None:
    """Return the descriptor of the locked file; None if another command has it, or has just deleted it."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if try_lock(descriptor) and is_at(lock, descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _check_name(name: str) -> None:
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(
            f'"{shorten(name)}" is not a cluster name: use lower-case letters, digits, dots, dashes and underscores'
        )


def _lock_file(name: str) -> Path:
    return clusters_dir() / f".{name}.lock"


def _load(name: str) -> ClusterRecord | None:
    path = clusters_dir() / name / _RECORD
    try:
        record = _parsed(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return ClusterRecord(name=name, problem=f"{path} can't be read: {one_line(error)}")
    return record.read_address() if record.name == name else ClusterRecord(name=name, problem=f"{path} is of another")


def _parsed(text: bytes) -> ClusterRecord:
    """Read a record, without the fields of the configuration that another version had. Raises ValueError."""
    try:
        return ClusterRecord.model_validate_json(text)
    except ValidationError as error:
        unknown = [problem["loc"] for problem in error.errors() if problem["type"] == "extra_forbidden"]
    content = json.loads(text)
    for *sections, field in unknown:
        section = content
        for name in sections:
            section = section[name]
        del section[field]
    return ClusterRecord.model_validate_json(json.dumps(content))
