"""Foreign workers, which ddptrain has not started: the slots that they offer, and how they host the ranks of a run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import dask
from distributed import Worker, WorkerPlugin

from ddptrain.gpus import visible_gpus
from ddptrain.protocol import deadlines
from ddptrain.protocol.rank_spec import GPU_RESOURCE, SLOT_RESOURCE, attached_plugin
from ddptrain.worker import rank_environment
from ddptrain.worker.rank_host import RankHost, own_host
from ddptrain.worker.rank_server_client import RankServerClient, RankServerLost

# Every nanny exports this variable, although it is not in Dask's configuration (distributed/nanny.py).
_NANNY_HASH_SEED = {"PYTHONHASHSEED": "6640"}


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
        host.server.close()
        host.server.wait(deadlines.HOST_END_S)
        shutil.rmtree(host.scratch, ignore_errors=True)

    def transition(self, key: Any, start: str, finish: str, **more: Any) -> None:
        """Pass Dask's call to the host. The own host of a worker is itself a plugin; it ignores the second call."""
        if self.host is not None:
            self.host.transition(key, start, finish, **more)


_lock = threading.Lock()  # runs come and go in threads


def _foreign_hosts(worker: Worker) -> list[RankHost]:
    """Return the rank host of each run on a foreign worker."""
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

    def new_server() -> RankServerClient:
        return RankServerClient(env, scratch / "rank-server.log")

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
