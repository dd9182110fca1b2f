"""The records of this user's clusters: one private folder each in the user's state directory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ddptrain import __version__
from ddptrain.clusters.security import CERT_FILE, write_private_json
from ddptrain.config.types import NAME_PATTERN
from ddptrain.config.wording import did_you_mean, shorten
from ddptrain.errors import ClusterError, UsageError, one_line
from ddptrain.file_ops import is_at, make_private, try_lock
from ddptrain.host_identity import (
    UNKNOWN_HOST,
    HostId,
    Relation,
    is_loopback,
    known_fields,
    relation,
    this_host,
    where_to_run,
)

_RECORD = "cluster.json"
_SCHEDULER = "scheduler.json"
_ENDED = "ended.json"
_LOCK_PATIENCE_S = 1.0  # `is_locked` in another process holds the lock for a moment


class ClusterNotFound(UsageError):
    """No cluster of this user has that name."""


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """One cluster: its `settings` (the cluster section of the YAML file) and its parts.

    `parts` belongs to the provider: process ids, job ids, hosts. `workers` is the expected number, `version` the
    version of ddptrain that started it, `host` the host of its local processes or of the command that started it.
    `settings` may contain secrets: they are left out of repr.
    """

    name: str
    backend: str
    started_at: str
    address: str = ""
    dashboard: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    parts: Mapping[str, Any] = field(default_factory=dict)
    workers: int = 0
    idle_timeout_s: float = 0.0
    version: str = __version__
    host: HostId = UNKNOWN_HOST

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> ClusterRecord:
        """Return a record that another version of ddptrain may have written. Raises TypeError, ValueError."""
        given = {"settings": {}, "parts": {}, "host": {}} | known_fields(cls, data)
        if not all(isinstance(given[name], Mapping) for name in ("settings", "parts", "host")):
            raise TypeError("settings, parts and host must be mappings")
        if given.get("version") != __version__:
            given["settings"] = _with_defaults(given["settings"])
        return cls(**given | {"host": HostId.of(given["host"])})


class Deployment:
    """A cluster's folder and its record; `problem` says why the record can't be read, or is ""."""

    def __init__(self, folder: Path, record: ClusterRecord, problem: str = "") -> None:
        self.folder = folder
        self.problem = problem
        self._record = record

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self._record.name

    @property
    def record(self) -> ClusterRecord:
        """The record, with the address and dashboard from scheduler.json."""
        if not self._record.address and (scheduler := _read(self.folder / _SCHEDULER)):
            return dataclasses.replace(
                self._record, address=str(scheduler.get("address", "")), dashboard=str(scheduler.get("dashboard", ""))
            )
        return self._record

    @property
    def tls_dir(self) -> Path | None:
        """The folder with the cluster's cert.pem and key.pem, or None for a cluster without TLS."""
        return self.folder if (self.folder / CERT_FILE).exists() else None

    @property
    def ended(self) -> Mapping[str, Any]:
        """Why the scheduler has ended by itself: {"reason", "at"}; empty otherwise."""
        return _read(self.folder / _ENDED)

    @property
    def relation(self) -> Relation:
        """Whether this host can use the cluster: SAME if its scheduler listens on a network.

        The processes of a cluster that listens on a network are checked one by one: see `processes.alive`.
        """
        record, address = self.record, urlsplit(self.record.address)
        only_there = record.backend == "local" or address.scheme == "unix" or is_loopback(address.hostname or "")
        return relation(record.host, this_host()) if only_there else Relation.SAME

    @property
    def elsewhere(self) -> str:
        """The host on which to run commands for this cluster; "" for this host."""
        return where_to_run(self.record.host, this_host()) if self.relation == Relation.OTHER else ""

    def check_here(self, hint: str = "") -> None:
        """Raise ClusterError, with the `hint`, on a host that can neither use nor end the cluster."""
        if where := self.elsewhere:
            raise ClusterError(f"the cluster {self.name} runs on {where}{'; ' if hint else ''}{hint}")

    def update(self, **changes: Any) -> None:
        """Change fields of the record; the file is written first."""
        changed = dataclasses.replace(self._record, **changes)
        _write(self.folder / _RECORD, changed)
        self._record = changed

    def remove(self) -> None:
        """Delete the folder of the cluster, with its keys."""
        shutil.rmtree(self.folder, ignore_errors=True)


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


def create(record: ClusterRecord) -> Deployment:
    """Create a cluster's folder here; the caller has locked the name. Raises UsageError if it exists or is wrong."""
    _check_name(record.name)
    record = dataclasses.replace(record, host=this_host())
    folder = clusters_dir() / record.name
    if _load(folder) is not None:
        raise UsageError(f"there is a cluster {record.name} already: ddptrain cluster down {record.name} ends it")
    shutil.rmtree(folder, ignore_errors=True)  # left by a command that was killed before it had written the record
    folder.mkdir(mode=0o700)
    _write(folder / _RECORD, record)
    return Deployment(folder, record)


def every() -> list[Deployment]:
    """Return all clusters of this user, by name."""
    folders = (folder for folder in sorted(clusters_dir().iterdir()) if re.fullmatch(NAME_PATTERN, folder.name))
    return [deployment for folder in folders if (deployment := _load(folder))]


def find(name: str) -> Deployment:
    """Return the cluster of that name.

    Raises:
        ClusterNotFound: there is none; the message has the most similar name.
        ClusterError: its record can't be read.
    """
    deployment = _load(clusters_dir() / name) if re.fullmatch(NAME_PATTERN, name) else None
    if deployment is None:
        known = [each.name for each in every()]
        hint = did_you_mean(name, known) or f"start it: ddptrain cluster up --name {shorten(name)}"
        raise ClusterNotFound(f'there is no cluster "{shorten(name)}" ({hint})')
    if deployment.problem:
        raise ClusterError(
            f"{deployment.problem}; end its processes yourself, then forget it: rm -r "
            f"{shlex.quote(str(deployment.folder))}"
        )
    return deployment


@contextlib.contextmanager
def locked(name: str, patience_s: float = _LOCK_PATIENCE_S) -> Iterator[None]:
    """Lock a name against other commands. Raises UsageError after `patience_s`, or if it is not allowed.

    The lock file is deleted with the cluster: each run with a cluster of its own has another name.
    """
    _check_name(name)
    folder = clusters_dir() / name
    lock = _lock_file(name)
    deadline = time.monotonic() + patience_s
    while (descriptor := _take(lock)) is None:
        if time.monotonic() > deadline:
            raise UsageError(f"another command is starting or ending the cluster {name}: wait for it")
        time.sleep(0.02)
    try:
        yield
    finally:
        if not folder.exists():
            lock.unlink(missing_ok=True)
        os.close(descriptor)


def is_locked(name: str) -> bool:
    """Return whether a command is starting, scaling or ending the cluster now."""
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


def _load(folder: Path) -> Deployment | None:
    path = folder / _RECORD
    if not path.exists():
        return None
    try:
        return Deployment(folder, ClusterRecord.of(json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return Deployment(folder, ClusterRecord(folder.name, "?", ""), f"{path} can't be read: {one_line(error)}")


def _with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a cluster with defaults for fields that the version which wrote them did not have."""
    from pydantic import BaseModel

    from ddptrain.config.sections.clusters import ClusterConfig, KubernetesSettings, SlurmSettings, SshSettings

    kinds: dict[str, type[BaseModel]] = {"ssh": SshSettings, "slurm": SlurmSettings, "kubernetes": KubernetesSettings}
    complete = {**ClusterConfig.model_construct().model_dump(mode="json"), **settings}
    for name, kind in kinds.items():
        if isinstance(complete.get(name), Mapping):
            complete[name] = {**kind.model_construct().model_dump(mode="json"), **complete[name]}
    return complete


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _write(path: Path, record: ClusterRecord) -> None:
    write_private_json(path, dataclasses.asdict(record), indent=1)
