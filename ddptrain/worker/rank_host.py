"""The host of ranks in a Dask worker: it keeps the rank server, knows the slots, and stops ranks that are released."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from distributed import Worker, WorkerPlugin
from distributed.comm.addressing import get_address_host

from ddptrain.errors import ClusterError
from ddptrain.protocol.encryption import Opener
from ddptrain.protocol.rank_spec import GPU_RESOURCE, SLOT_RESOURCE, key_prefix
from ddptrain.worker import environment
from ddptrain.worker.rank_server_client import RankServer

PLUGIN_NAME = "ddptrain"
MOST_SLOTS = 1024
RELEASED_GRACE_S = 5.0  # for a rank whose driver is gone: others wait for its slot
_LEAVE_MARGIN_S = 5.0  # beyond the ranks' grace, for files that are brought home from here
GONE_STATES = frozenset({"released", "forgotten", "cancelled", "error"})


def own_host(worker: Worker) -> RankHost | None:
    """The host of a worker that ddptrain has started; None on a worker of others."""
    return cast("RankHost | None", worker.plugins.get(PLUGIN_NAME))


def slot_resources(slots: int, gpus: Sequence[str]) -> dict[str, float]:
    """Dask's abstract resources for so many slots. Raises ClusterError where they are too many, or none."""
    if not 1 <= slots <= MOST_SLOTS:
        raise ClusterError(f"{slots} slots were asked for: a worker has from 1 to {MOST_SLOTS}")
    if gpus and slots > len(gpus):
        raise ClusterError(f"{slots} slots were asked for, but there are {len(gpus)} GPUs here, one a rank")
    return {SLOT_RESOURCE: float(slots)} | ({GPU_RESOURCE: float(slots)} if gpus else {})


def _store_id(key: str) -> str:
    return f"{key}/store"


class RankHost(WorkerPlugin):
    """A host of ranks: one of these lives in every Dask worker that ranks run on.

    `server` is its rank server and `renew` makes another one where that has died; `environ` is what ranks inherit,
    `gpus` the device of each slot (none on the CPU), `scratch` the folder for what ranks write.
    """

    name = PLUGIN_NAME

    def __init__(
        self,
        server: RankServer,
        renew: Callable[[], RankServer],
        environ: dict[str, str],
        gpus: tuple[str, ...],
        scratch: Path,
    ) -> None:
        self.server = server
        self._renew = renew
        self.environ = environ
        self.gpus = gpus
        self.scratch = scratch
        # Left in the scratch folder: a driver that can read it shares this file system.
        self.token = os.urandom(16).hex()
        self.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.scratch / "token").write_text(self.token)
        # Task key -> its children (a rank, and a store where it opened one) and how long each may take to end.
        self._children: dict[str, dict[str, float]] = {}
        self.leaving = False
        self.opener = Opener()
        self._lock = threading.Lock()
        self._mending = threading.Lock()

    def setup(self, worker: Worker) -> None:
        """Hear from the rank server from now on."""
        self.worker = worker
        self.server.listen()

    async def teardown(self, worker: Worker) -> None:
        """End the rank server, and so every rank."""
        self.server.close()

    def mend(self) -> None:
        """Start another rank server where the last one is lost: a run may come that has nothing to do with that."""
        with self._mending:
            if self.server.fault is not None and not self.server.closed:
                server = self._renew()
                server.listen()
                self.server = server

    def metric(self, worker: Worker) -> dict[str, Any]:
        """What the worker's heartbeats tell: whether ranks start warm, and how many there are."""
        return {"warm": self.server.ready.is_set() and self.server.fault is None, "ranks": self.server.ranks}

    @property
    def interface(self) -> str | None:
        """The network interface that carries the worker's address."""
        return environment.interface_of(get_address_host(self.worker.address))

    def gpu_of(self, slot: int) -> str | None:
        """The device of a slot (an entry for CUDA_VISIBLE_DEVICES), or None on the CPU."""
        return self.gpus[slot] if slot < len(self.gpus) else None

    def place_of(self, slot: int) -> str:
        """What only one rank may hold at a time, as the rank server knows it: the GPU, or the slot of this worker."""
        gpu = self.gpu_of(slot)
        return f"GPU {gpu}" if gpu is not None else f"{self.worker.name} slot {slot}"

    def hold(self, key: str, child_id: str, grace_s: float) -> None:
        """Tie a child's life to a task key: when Dask lets go of the key, the child is stopped."""
        with self._lock:
            self._children.setdefault(key, {})[child_id] = grace_s

    def open_store(self, key: str, host: str) -> int:
        """Start a TCPStore for the gang of `key`; return its port. It lives as long as the key."""
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
            listening.bind((host, 0))
            listening.listen(1024)
            self.hold(key, _store_id(key), grace_s=0.0)
            self.server.start_store(_store_id(key), host, listening, key)
            return int(listening.getsockname()[1])

    def stop(self, key: str, grace_s: float | None = None) -> None:
        """SIGTERM to the rank of `key`, SIGKILL after `grace_s` (default: the run's own); its store lives on."""
        with self._lock:
            own_grace_s = self._children.get(key, {}).get(key)
        if own_grace_s is not None:
            self.server.stop(key, own_grace_s if grace_s is None else grace_s)

    def is_released(self, key: str) -> bool:
        """Whether Dask has let go of a key: then nobody waits for its ranks, or stops them later."""
        task = self.worker.state.tasks.get(key)
        return key not in self._children or task is None or task.state in GONE_STATES

    def kill(self, key: str) -> None:
        """End at once what was started for a key that had been released before."""
        for child_id in (key, _store_id(key)):
            self.server.stop(child_id, 0.0)

    async def leave(self, told: Callable[[], bool]) -> None:
        """Have the drivers of all ranks here tell them to save and end, and wait for that, within the ranks' grace.

        `told` says whether this process was told a second time to end: then nobody waits any longer.
        """
        self.leaving = True  # the tasks of the ranks pass it on
        with self._lock:
            graces = [grace_s for children in self._children.values() for grace_s in children.values()]
        deadline = time.monotonic() + max(graces, default=0.0) + _LEAVE_MARGIN_S
        # Ranks and keys end in different threads.
        while (self.server.ranks or self._children) and time.monotonic() < deadline and not told():  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def let_go(self, key: str) -> None:
        """Nobody waits for the ranks of `key` any more: its children end soon."""
        with self._lock:
            children = self._children.pop(key, {})
        for child_id, grace_s in children.items():
            self.server.stop(child_id, min(grace_s, RELEASED_GRACE_S))

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        """Dask has let go of a key (the driver is gone, or is done with it): its children end."""
        if finish in GONE_STATES:
            self.let_go(key)

    def remove_run(self, run_id: str) -> None:
        """End what is left of a run's ranks, and delete what they wrote. Takes seconds where ranks are left."""
        with self._lock:
            keys = [key for key in self._children if key.startswith(key_prefix(run_id))]
        for key in keys:
            self.let_go(key)
        deadline = time.monotonic() + RELEASED_GRACE_S + 1.0
        while any(self.server.has(key) for key in keys) and time.monotonic() < deadline:
            time.sleep(0.02)
        shutil.rmtree(self.scratch / run_id, ignore_errors=True)
