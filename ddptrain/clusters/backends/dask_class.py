"""Clusters of any `distributed.deploy.Cluster` class: LocalCluster, FargateCluster, Coiled, SaturnCluster, ...

A class is used for one run: a child of the driver (dask_class_process.py) creates the object, and closes it when the
driver closes its stdin, or is killed. In a process of its own, what the class prints does not mix with the output of a
run, and Ctrl-C does not reach its workers. `cluster up` only starts classes whose cluster lives in a cloud.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddptrain.clusters import processes
from ddptrain.clusters.backends.dask_class_process import DaskClusterOrder
from ddptrain.clusters.processes import PYTHON, DaemonOrder
from ddptrain.clusters.provider import Backend, Cluster, Tell
from ddptrain.clusters.record import ClusterRecord, Part
from ddptrain.clusters.resolve import Target
from ddptrain.clusters.security import CERT_FILE, own_security
from ddptrain.config.sections.clusters import ClusterConfig
from ddptrain.errors import ClusterError, DdptrainError, UsageError

_MODULE = "ddptrain.clusters.backends.dask_class_process"
_LOG = "class"
_POLL_S = 0.05
_TELL_EVERY_S = 5.0  # seconds between progress messages: a user may want to interrupt the wait
_STOP_S = 60.0  # cloud machines take longer to end than a process
_LOG_LINES = 8


class DaskClassCluster(Cluster):
    """A cluster of a class for one run."""

    def __init__(self, config: ClusterConfig, tell: Tell) -> None:
        self.config = config
        self.name = config.class_name
        self._tell = tell
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def description(self) -> str:
        """What it is, for messages."""
        return f"a cluster of {self.name}"

    def begin(self) -> None:
        """Start the process that creates the object."""
        self._folder = tempfile.TemporaryDirectory(prefix="ddptrain-class-", ignore_cleanup_errors=True)
        _order(self.config).write(self.folder)
        with (self.folder / f"{_LOG}.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, "hold", str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def folder(self) -> Path:
        """The private folder for its certificate and its log."""
        assert self._folder is not None
        return Path(self._folder.name)

    def connect(self) -> Target:
        """Wait for the cluster; return its address. Raises ClusterError, UsageError."""
        self._tell(f"starting {self.description}")
        began = time.monotonic()
        while (card := _json(self.folder / "scheduler.json")) is None:
            if (fault := self._ended()) is not None:
                raise fault
            if time.monotonic() - began > self.config.start_timeout_s:
                limit = f"{self.config.start_timeout_s:g} s (cluster.start_timeout_s)"
                raise ClusterError(f"{self.name} is not up after {limit}{_log_end(self.folder)}")
            time.sleep(_POLL_S)
        tls = own_security(self.folder) if (self.folder / CERT_FILE).exists() else None
        return Target(str(card["address"]), tls)

    def worker_fault(self) -> str | None:
        """Return why the process has ended; None while it runs."""
        fault = self._ended()
        return None if fault is None else str(fault)

    def last_words(self) -> str:
        """Return the end of what the class has written."""
        return _log_end(self.folder).lstrip("\n")

    def close(self) -> None:
        """Close the cluster, also one that is still being created."""
        if self._process is None or self._process.stdin is None or self._folder is None:
            return
        was_running = self._process.poll() is None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            pid = self._process.pid
            self._tell(f"{self.name} is not closed after {_STOP_S:g} s: process {pid} will close it and end")
            return
        if was_running and self._process.returncode and (fault := self._ended()):
            self._tell(f"{fault}; what it has started may still be there")
        self._folder.cleanup()

    def _ended(self) -> DdptrainError | None:
        assert self._process is not None
        if self._process.poll() is None:
            return None
        return _failure(self.folder, self._process.pid)


# The classes whose clusters live on without their object: arguments to create one that stays, the attribute that names
# it (and the argument that attaches to it), and the arguments of close().
@dataclass(frozen=True, slots=True)
class _Cloud:
    handle: str
    create: Mapping[str, Any] = field(default_factory=dict)
    close: Mapping[str, Any] = field(default_factory=dict)


_CLOUDS = {
    "dask_saturn.SaturnCluster": _Cloud("cluster_url"),
    "coiled.Cluster": _Cloud("name", {"shutdown_on_close": False}, {"force_shutdown": True}),
}


class DaskClassBackend(Backend):
    """Creates a cluster in a cloud and leaves it there; the record has its address."""

    def start(self, cluster: ClusterRecord, tell: Tell) -> Generator[Part]:
        """Create the cluster, and wait for its workers. Raises ClusterError, UsageError."""
        config, name = cluster.config, cluster.config.class_name
        if name not in _CLOUDS:
            raise UsageError(
                f"a cluster of {name} ends with the process that has created it: give its class to a run, without "
                "`cluster up`; or create it in a program of your own, and use cluster.address"
            )
        if config.idle_timeout_s:
            raise UsageError(f"cluster.idle_timeout_s is not kept by {name}: use its own setting, in cluster.kwargs")
        part = Part(role="cloud", id=name, log=str(cluster.folder / f"{_LOG}.log"))
        yield part
        part = _begun(cluster, part, "create")
        shown_at = time.monotonic()
        while (card := _json(cluster.folder / "scheduler.json")) is None:
            assert part.process is not None
            if not processes.alive(part.process):
                raise _failure(cluster.folder, part.process.pid)
            if time.monotonic() - shown_at > _TELL_EVERY_S:
                tell(f"{name} is starting")
                shown_at = time.monotonic()
            yield part
            time.sleep(_POLL_S)
        cluster.address, cluster.workers = str(card["address"]), int(card["workers"])
        yield part

    def fault(self, cluster: ClusterRecord) -> str | None:
        """Return None: only the cloud knows."""
        return None

    def logs(self, cluster: ClusterRecord, lines: int) -> Mapping[str, str]:
        """Return what the class has written; the pages of the cloud have the logs of its machines."""
        return {_LOG: processes.tail(str(cluster.folder), _LOG, lines)}

    def stop(self, cluster: ClusterRecord, tell: Tell) -> None:
        """Close the cluster, also one that is still starting. Raises ClusterError if it can't be closed."""
        for part in cluster.of_role("cloud"):
            _await_end(part, tell)
            if (error := _json(cluster.folder / "error.json")) is not None and error["is_usage"]:
                continue  # nothing was started
            (cluster.folder / "error.json").unlink(missing_ok=True)
            closing = _begun(cluster, part, "close")
            _await_end(closing, tell)
            if _json(cluster.folder / "error.json") is not None and closing.process is not None:
                fault = _failure(cluster.folder, closing.process.pid)
                cluster.parts = []  # a second `cluster down` has nothing left to end
                cluster.save()
                raise ClusterError(
                    f"{fault}; what it has started may still be there: see the pages of the cloud; "
                    f"ddptrain cluster down {cluster.name} deletes its record"
                )


def _order(config: ClusterConfig, cloud: _Cloud | None = None, name: str = "") -> DaskClusterOrder:
    ranks = config.ranks if isinstance(config.ranks, int) else None
    kwargs = dict(config.kwargs)
    if cloud is not None:
        kwargs |= cloud.create
        if cloud.handle == "name":
            kwargs.setdefault("name", f"ddptrain-{name}")
    handle, closing = (cloud.handle, cloud.close) if cloud else ("", {})
    return DaskClusterOrder(
        config.class_name, kwargs, ranks, config.start_timeout_s, [os.getcwd()], handle, dict(closing)
    )


def _begun(cluster: ClusterRecord, part: Part, verb: str) -> Part:
    _order(cluster.config, _CLOUDS[part.id], cluster.name).write(cluster.folder)
    command = [PYTHON, "-P", "-m", _MODULE, verb, str(cluster.folder)]
    started = processes.start(DaemonOrder(_LOG, str(cluster.folder), command))
    return part.model_copy(update={"process": started})


def _await_end(part: Part, tell: Tell) -> None:
    """Wait for the process: what its constructor has ordered would stay if it were killed."""
    began = shown_at = time.monotonic()
    while part.process is not None and processes.alive(part.process):
        now = time.monotonic()
        if now - began > _STOP_S:
            raise ClusterError(f"{part.id} is still starting or closing after {_STOP_S:g} s ({part.description})")
        if now - shown_at > _TELL_EVERY_S:
            tell(f"waiting for {part.id}")
            shown_at = now
        time.sleep(_POLL_S)


def _failure(folder: Path, pid: int) -> DdptrainError:
    """Return why the process has ended, with the end of its log if one line is not enough."""
    error = _json(folder / "error.json")
    if error is None:
        return ClusterError(f"the process that holds the cluster (pid {pid}) has ended{_log_end(folder)}")
    if error["is_usage"]:
        return UsageError(str(error["message"]))
    return ClusterError(f"{error['message']}{_log_end(folder)}")


def _log_end(folder: Path) -> str:
    log = processes.tail(str(folder), _LOG, _LOG_LINES).strip()
    return "\nlast lines of its log:\n  " + log.replace("\n", "\n  ") if log else ""


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found
