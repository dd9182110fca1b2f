"""Hosts ranks in a Dask worker: owns the rank server and the slots, and stops ranks whose Dask key is released.

Our own worker has one RankHost for its whole life, as a plugin. A foreign worker, which ddptrain has not started, has
one while runs are attached to it, each by a plugin of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import dask
from distributed import Worker, WorkerPlugin
from distributed.comm.addressing import get_address_host

from ddptrain.errors import ClusterError
from ddptrain.gpus import visible_gpus
from ddptrain.protocol import deadlines
from ddptrain.protocol.rank_spec import GPU_RESOURCE, SLOT_RESOURCE, attached_plugin, key_prefix
from ddptrain.worker import rank_environment
from ddptrain.worker.rank_server_client import RankServerClient, RankServerLost

PLUGIN_NAME = "ddptrain"
MAX_SLOTS = 1024
_SPECS_S = 30.0  # from the start of a task to the arrival of its specs, which were sent before
_RELEASED_STATES = frozenset({"released", "forgotten", "cancelled", "error"})


def own_host(worker: Worker) -> RankHost | None:
    """Return the rank host of a worker that ddptrain has started; None for a foreign worker."""
    return cast("RankHost | None", worker.plugins.get(PLUGIN_NAME))


def slot_resources(slots: int, gpus: Sequence[str]) -> dict[str, float]:
    """Return the Dask resources for a number of slots. Raises ClusterError if there are too many slots, or none."""
    if not 1 <= slots <= MAX_SLOTS:
        raise ClusterError(f"{slots} slots were asked for: a worker has from 1 to {MAX_SLOTS}")
    if gpus and slots > len(gpus):
        raise ClusterError(f"{slots} slots were asked for, but there are {len(gpus)} GPUs here, and a rank needs one")
    return {SLOT_RESOURCE: float(slots)} | ({GPU_RESOURCE: float(slots)} if gpus else {})


def _store_id(key: str) -> str:
    return f"{key}/store"


class RankHost(WorkerPlugin):
    """Hosts ranks in one Dask worker.

    `server` is the client of its rank server; `new_server` starts another one: for the Python of an environment, or
    after one has died. `environ` is the environment that ranks inherit. `gpus` has the device of each slot (empty on
    the CPU). Ranks write below `scratch`.
    """

    name = PLUGIN_NAME

    def __init__(
        self,
        server: RankServerClient,
        new_server: Callable[[str], RankServerClient],
        environ: dict[str, str],
        gpus: tuple[str, ...],
        scratch: Path,
    ) -> None:
        self.server = server  # the one that is warm for runs without an environment of their own
        self._new_server = new_server
        self._others: dict[str, RankServerClient] = {}  # by the Python of their environment
        self._held: dict[str, int] = {}  # that Python -> the descriptor that keeps its environment
        self._python_of: dict[str, str] = {}  # run -> the Python of its environment
        self.environ = environ
        self.gpus = gpus
        self.scratch = scratch
        # A driver that can read this file shares the file system with the worker.
        self.token = os.urandom(16).hex()
        self.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.scratch / "token").write_text(self.token)
        # Task key -> its children (its ranks, and possibly a store) -> grace period of each child in seconds
        self._children: dict[str, dict[str, float]] = {}
        self._stops: dict[str, float | None] = {}  # rank's key -> grace period of the last stop, also before its start
        self.leaving = False
        self._specs: dict[str, tuple[int, dict[int, str]]] = {}  # run -> attempt, and JSON by rank
        self._lock = threading.Lock()
        self._specs_came = threading.Condition()
        self._replace_lock = threading.Lock()

    def setup(self, worker: Worker) -> None:
        """Start to receive the rank server's reports. Dask calls this when the plugin is added."""
        self.worker = worker
        self.server.listen()

    async def teardown(self, worker: Worker) -> None:
        """End the rank servers and all their ranks."""
        self.close_servers()

    @property
    def servers(self) -> list[RankServerClient]:
        """All rank servers: the warm one first."""
        return [self.server, *self._others.values()]

    def close_servers(self) -> None:
        """End the rank servers and all their ranks."""
        for server in self.servers:
            server.close()
        while self._held:
            os.close(self._held.popitem()[1])

    def wait_for_slots(self, key: str) -> None:
        """Wait until the other rank servers have no ranks of released tasks: a rank that ends still uses its slot."""
        deadline = time.monotonic() + deadlines.RELEASED_GRACE_S + 1.0
        others = [server for server in self.servers if server is not self.server_of(key)]
        while time.monotonic() < deadline:
            with self._lock:
                children = [child for children in self._children.values() for child in children]
            registered = [child for child in children if not child.endswith(_store_id(""))]
            if all(server.ranks == sum(map(server.has, registered)) for server in others):
                break
            time.sleep(0.02)

    def server_of(self, key: str) -> RankServerClient:
        """Return the rank server of the run to which the key of a rank or a store belongs."""
        run_id = key.removeprefix("ddptrain/").partition("/")[0]
        return self._others.get(self._python_of.get(run_id, ""), self.server)

    def replace_lost_server(self) -> None:
        """Start another rank server if the current one has died, so that new runs can use this worker."""
        with self._replace_lock:
            self.server = self._intact(self.server)

    def _intact(self, server: RankServerClient) -> RankServerClient:
        """Return the server, or another one of its Python if it has died."""
        if server.fault is None or server.closed:
            return server
        another = self._new_server(server.python)
        another.listen()
        return another

    def use_python(self, run_id: str, python: str, held: int) -> None:
        """Start the ranks of a run from the Python of an environment, which the descriptor `held` keeps.

        Its rank server stays warm for other runs; those of other environments that no run uses are ended.
        """
        with self._replace_lock:
            self._python_of[run_id] = python
            used = {python, *self._python_of.values()}
            for other in [each for each in self._others if each not in used and not self._others[each].ranks]:
                self._others.pop(other).close()
                os.close(self._held.pop(other))
            if python in self._held:
                os.close(held)
            else:
                self._held[python] = held
            if python == self.server.python:
                self.server = self._intact(self.server)
            elif python in self._others:
                self._others[python] = self._intact(self._others[python])
            else:
                self._others[python] = self._new_server(python)
                self._others[python].listen()

    def metric(self, worker: Worker) -> dict[str, Any]:
        """Return a part of the worker's heartbeat: whether ranks start warm, and the number of ranks."""
        return {"warm": self.server.ready.is_set() and self.server.fault is None, "ranks": self.ranks}

    @property
    def ranks(self) -> int:
        """The number of ranks that were requested and have not ended."""
        return sum(server.ranks for server in self.servers)

    @property
    def interface(self) -> str | None:
        """The network interface that has the worker's address."""
        return rank_environment.interface_of(get_address_host(self.worker.address))

    def gpu_of(self, slot: int) -> str | None:
        """Return the device of a slot (an entry for CUDA_VISIBLE_DEVICES); None on the CPU."""
        return self.gpus[slot] if slot < len(self.gpus) else None

    def slot_name(self, slot: int) -> str:
        """Return the name by which the rank server reserves a slot for one rank: its GPU, or worker and slot."""
        gpu = self.gpu_of(slot)
        return f"GPU {gpu}" if gpu is not None else f"{self.worker.name} slot {slot}"

    def keep_specs(self, run_id: str, attempt: int, texts: dict[int, str]) -> None:
        """Keep the specs of an attempt for its task; each text is that of one rank, as JSON."""
        with self._specs_came:
            self._specs[run_id] = attempt, texts
            self._specs_came.notify_all()

    def take_specs(self, run_id: str, attempt: int) -> dict[int, str]:
        """Return the specs of an attempt, once. Waits for them. Raises RankServerLost if they do not arrive."""
        with self._specs_came:
            if not self._specs_came.wait_for(lambda: self._specs.get(run_id, (0, {}))[0] == attempt, _SPECS_S):
                raise RankServerLost(f"the driver has sent no specs of its ranks within {_SPECS_S:g} s")
            return self._specs.pop(run_id)[1]

    def register(self, key: str, child_id: str, grace_s: float) -> None:
        """Stop the child with this grace period when Dask releases the task key."""
        with self._lock:
            self._children.setdefault(key, {})[child_id] = grace_s

    def open_store(self, key: str, host: str) -> int:
        """Start the TCPStore of the worker group to which `key` belongs. Return its port."""
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
            listening.bind((host, 0))
            listening.listen(1024)
            self.register(key, _store_id(key), grace_s=0.0)
            self.server_of(key).start_store(_store_id(key), host, listening, key)
            return int(listening.getsockname()[1])

    def stop(self, key: str, grace_s: float | None = None) -> None:
        """Send SIGTERM to the rank `key`, and SIGKILL after `grace_s` (default: the run's own).

        The store keeps running.
        """
        with self._lock:
            self._stops[key] = grace_s
            run_grace_s = next((children[key] for children in self._children.values() if key in children), None)
        if run_grace_s is not None:
            self.server_of(key).stop(key, run_grace_s if grace_s is None else grace_s)

    def stop_if_told(self, key: str) -> None:
        """Stop a rank that has just started, if its driver said so before: the rank server did not know it then."""
        if key in self._stops:
            self.stop(key, self._stops[key])

    def is_released(self, key: str) -> bool:
        """Return whether Dask has released the key of a task, so that nothing would stop ranks that start now."""
        task = self.worker.state.tasks.get(key)
        return key not in self._children or task is None or task.state in _RELEASED_STATES

    def kill(self, key: str) -> None:
        """Kill the rank `key`, and the store that was started with it, after Dask has released their task."""
        for child_id in (key, _store_id(key)):
            self.server_of(key).stop(child_id, 0.0)

    async def drain(self, urgent: Callable[[], bool]) -> None:
        """Ask the drivers to preempt all ranks of this worker, and wait until the ranks have ended.

        Wait at most for the ranks' grace period, and no longer once `urgent()` is true: the process was told a second
        time to end.
        """
        self.leaving = True  # the ranks' tasks notify their drivers
        with self._lock:
            graces = [grace_s for children in self._children.values() for grace_s in children.values()]
        deadline = time.monotonic() + max(graces, default=0.0) + deadlines.LEAVE_MARGIN_S
        # Polled, because ranks and keys end in different threads.
        while (self.ranks or self._children) and time.monotonic() < deadline and not urgent():  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def release(self, key: str) -> None:
        """Stop the children of a key that Dask has released."""
        with self._lock:
            children = self._children.pop(key, {})
        for child_id, grace_s in children.items():
            self.server_of(key).stop(child_id, min(grace_s, deadlines.RELEASED_GRACE_S))

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        """Stop a key's children when Dask releases the key, because its driver has ended."""
        if finish in _RELEASED_STATES:
            self.release(key)

    def remove_run(self, run_id: str) -> None:
        """Stop all ranks of a run and delete its files. Takes some seconds if ranks are still running."""
        with self._lock:
            keys = [key for key in self._children if key.startswith(key_prefix(run_id))]
            ranks = [child for key in keys for child in self._children[key]]
            self._specs.pop(run_id, None)
            self._stops = {
                key: grace_s for key, grace_s in self._stops.items() if not key.startswith(key_prefix(run_id))
            }
        for key in keys:
            self.release(key)
        deadline = time.monotonic() + deadlines.RELEASED_GRACE_S + 1.0
        while any(self.server_of(rank).has(rank) for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._python_of.pop(run_id, None)
        shutil.rmtree(self.scratch / run_id, ignore_errors=True)


# --- foreign workers, which ddptrain has not started ---

# Every nanny exports this variable, although it is not in Dask's configuration (distributed/nanny.py).
_NANNY_HASH_SEED = {"PYTHONHASHSEED": "6640"}
_lock = threading.Lock()  # runs come and go in threads


class RunPlugin(WorkerPlugin):
    """Represents a run on a worker. Removing the plugin stops the run's ranks there and deletes their files."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.name = attached_plugin(run_id)
        self.host: RankHost | None = None  # shared by all runs on this worker, and ended with the last of them
        self._removed = False

    async def setup(self, worker: Worker) -> None:
        """Use the worker's rank host, or create one. Raises RankServerLost, ClusterError."""
        await asyncio.to_thread(self._join_host, worker)
        if self._removed:  # the driver has ended in the meantime
            await self.teardown(worker)

    def _join_host(self, worker: Worker) -> None:
        with _lock:
            self.host = own_host(worker) or next(iter(_foreign_hosts(worker)), None) or _new_host(worker)

    async def teardown(self, worker: Worker) -> None:
        """Clean up. Dask calls this when the run is over or its driver has ended."""
        self._removed = True
        # A worker that closes meanwhile cancels this. The thread continues; Dask would log the cancellation with a
        # traceback, which then looks like the cause of the worker's end.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.to_thread(self._leave_host, worker)

    def _leave_host(self, worker: Worker) -> None:
        with _lock:
            host, self.host = self.host, None
            is_last = host is not None and host is not own_host(worker) and host not in _foreign_hosts(worker)
        if host is None:
            return
        if not is_last:
            host.remove_run(self.run_id)
            return
        host.close_servers()
        for server in host.servers:
            server.wait(deadlines.HOST_END_S)
        shutil.rmtree(host.scratch, ignore_errors=True)

    def transition(self, key: Any, start: str, finish: str, **more: Any) -> None:
        """Pass Dask's call to the host. The own host of a worker is itself a plugin; it ignores the second call."""
        if self.host is not None:
            self.host.transition(key, start, finish, **more)


def _foreign_hosts(worker: Worker) -> list[RankHost]:
    plugins = [plugin for plugin in list(worker.plugins.values()) if isinstance(plugin, RunPlugin)]
    return [plugin.host for plugin in plugins if plugin.host is not None]


def rank_host(worker: Worker, run_id: str) -> RankHost:
    """Return the rank host for a run: the worker's own, or one created for the run. Raises RankServerLost if none."""
    plugin = worker.plugins.get(attached_plugin(run_id))
    host = own_host(worker) or (plugin.host if isinstance(plugin, RunPlugin) else None)
    if host is None:
        raise RankServerLost(f"the run {run_id} is not attached to the worker {worker.address} (any more)")
    return host


async def attach(worker: Worker, run_id: str) -> RankHost:
    """Attach a run to this worker, if it is not attached yet. Raises RankServerLost, ClusterError."""
    name = attached_plugin(run_id)
    if name not in worker.plugins:
        try:
            await worker.plugin_add(RunPlugin(run_id), name=name, catch_errors=False)
        except BaseException:
            worker.plugins.pop(name, None)
            raise
    host = rank_host(worker, run_id)
    await asyncio.to_thread(host.replace_lost_server)
    return host


def offered_slots(worker: Worker) -> tuple[int, tuple[str, ...]]:
    """Return the number of slots of this worker, and the GPUs of its first slots.

    Our workers, and others that were started with the resource "slot", offer as many slots as the resource says. Any
    other worker offers one slot: on the first GPU of its CUDA_VISIBLE_DEVICES (dask-cuda rotates this list for each
    of its workers) or of its resource "GPU".
    """
    resources = worker.state.total_resources
    host = own_host(worker)
    if host is not None:
        slots = min(int(resources[SLOT_RESOURCE]), worker.state.nthreads)
        return slots, host.gpus[:slots]
    with_gpu = int(resources.get(GPU_RESOURCE, 0))
    if SLOT_RESOURCE in resources:
        slots = min(int(resources[SLOT_RESOURCE]), worker.state.nthreads)
    else:
        slots, with_gpu = 1, max(with_gpu, int("CUDA_VISIBLE_DEVICES" in os.environ))
    return slots, visible_gpus(os.environ)[: min(slots, with_gpu)] if with_gpu else ()


def _new_host(worker: Worker) -> RankHost:
    environ = rank_environment.without_nanny(os.environ, _nanny_environ(worker))
    _, gpus = offered_slots(worker)
    env = rank_environment.server_environment(environ)
    scratch = Path(worker.local_directory) / f"ddptrain-{os.urandom(4).hex()}"
    scratch.mkdir(mode=0o700)

    def new_server(python: str = sys.executable) -> RankServerClient:
        return RankServerClient(env, scratch / "rank-server.log", python)

    try:
        host = RankHost(new_server(), new_server, environ, gpus, scratch)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise RankServerLost(f"the rank server can't be started: {error}") from error
    host.setup(worker)
    return host


def _nanny_environ(worker: Worker) -> dict[str, object]:
    """Return the variables that the worker's nanny has exported; empty if it has no nanny."""
    if worker.nanny is None:
        return {}
    exported = (dask.config.get(f"distributed.nanny.{part}", {}) for part in ("pre-spawn-environ", "environ"))
    return {name: value for part in exported for name, value in part.items()} | _NANNY_HASH_SEED
