"""The worker plugin: it keeps the rank server, knows the worker's slots, and stops ranks whose keys are released."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any, cast

from distributed import Worker, WorkerPlugin

from ddptrain.worker.server import RankServer

PLUGIN_NAME = "ddptrain"
_GONE_STATES = frozenset({"released", "forgotten", "cancelled", "error"})


def rank_host(worker: Worker) -> RankHost:
    """The plugin of this worker."""
    return cast(RankHost, worker.plugins[PLUGIN_NAME])


class RankHost(WorkerPlugin):
    """A host of ranks: one of these lives in every Dask worker that ranks run on."""

    name = PLUGIN_NAME

    def __init__(self, server: RankServer, environ: dict[str, str], gpus: tuple[str, ...], scratch: Path) -> None:
        self.server = server
        self.environ = environ
        self.gpus = gpus
        self.scratch = scratch
        self.token = os.urandom(16).hex()
        # Task key -> its children (a rank, and a store where it opened one) and how long each may take to end.
        self._children: dict[str, dict[str, float]] = {}
        self._lock = threading.Lock()

    def setup(self, worker: Worker) -> None:
        """Leave a token in the scratch folder: a driver that can read it shares this file system."""
        self.worker = worker
        self.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.scratch / "token").write_text(self.token)
        self.server.listen()

    def teardown(self, worker: Worker) -> None:
        """End the rank server, and so every rank."""
        self.server.close()

    def gpu_of(self, slot: int) -> str | None:
        """The device of a slot (an entry for CUDA_VISIBLE_DEVICES), or None on the CPU."""
        return self.gpus[slot % len(self.gpus)] if self.gpus else None

    def hold(self, key: str, child_id: str, grace_s: float) -> None:
        """Tie a child's life to a task key: when Dask lets go of the key, the child is stopped."""
        with self._lock:
            self._children.setdefault(key, {})[child_id] = grace_s

    def open_store(self, key: str, host: str) -> int:
        """Start a TCPStore for the gang of `key`; return its port. It lives as long as the key."""
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
            listening.bind((host, 0))
            listening.listen(1024)
            store_id = f"{key}/store"
            self.hold(key, store_id, grace_s=0.0)
            self.server.start_store(store_id, host, listening)
            return int(listening.getsockname()[1])

    def stop(self, key: str, grace_s: float | None = None) -> None:
        """SIGTERM to the rank of `key`, SIGKILL after `grace_s` (default: the run's own); its store lives on."""
        with self._lock:
            own_grace_s = self._children.get(key, {}).get(key)
        if own_grace_s is not None:
            self.server.stop(key, own_grace_s if grace_s is None else grace_s)

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        """Dask has let go of a key (the driver is gone, or is done with it): its children end."""
        if finish not in _GONE_STATES:
            return
        with self._lock:
            children = self._children.pop(key, {})
        for child_id, grace_s in children.items():
            self.server.stop(child_id, grace_s)
