"""Foreign workers, which ddptrain has not started: the slots that they offer, and how they host the ranks of a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import dask
from distributed import Worker, WorkerPlugin

from ddptrain import __version__
from ddptrain.file_ops import sha256
from ddptrain.gpus import visible_gpus
from ddptrain.protocol import deadlines
from ddptrain.protocol.exec_env import exec_only
from ddptrain.protocol.rank_spec import GPU_RESOURCE, SLOT_RESOURCE, attached_plugin
from ddptrain.worker import rank_environment
from ddptrain.worker.rank_host import RankHost, own_host
from ddptrain.worker.rank_server_client import RankServerLost, SharedRankServerClient

# Every nanny exports this variable, although it is not in Dask's configuration (distributed/nanny.py).
_NANNY_HASH_SEED = {"PYTHONHASHSEED": "6640"}


class RunPlugin(WorkerPlugin):
    """Represents a run on a worker. Removing the plugin stops the run's ranks there and deletes their files."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.name = attached_plugin(run_id)
        self.host: RankHost | None = None
        self._is_own = False  # whether the host belongs to the worker and outlives the run
        self._removed = False

    async def setup(self, worker: Worker) -> None:
        """Use the worker's own rank host, or create one for this run. Raises RankServerLost, ClusterError."""
        host = own_host(worker)
        self._is_own = host is not None
        if host is None:
            host = await asyncio.to_thread(_new_host, worker, self.run_id)
            host.setup(worker)
        self.host = host
        if self._removed:  # the driver has ended in the meantime
            await self.teardown(worker)

    async def teardown(self, worker: Worker) -> None:
        """Clean up. Dask calls this when the run is over or its driver has ended."""
        self._removed = True
        host, self.host = self.host, None
        if host is not None:
            remove = partial(host.remove_run, self.run_id) if self._is_own else partial(_remove_host, host)
            # A worker that closes meanwhile cancels this. The thread continues; Dask would log the cancellation with a
            # traceback, which then looks like the cause of the worker's end.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.to_thread(remove)

    def transition(self, key: Any, start: str, finish: str, **more: Any) -> None:
        """Pass Dask's call to the host. The own host of a worker is itself a plugin, and Dask calls it directly."""
        if self.host is not None and not self._is_own:
            self.host.transition(key, start, finish, **more)


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


def _new_host(worker: Worker, run_id: str) -> RankHost:
    environ = rank_environment.without_nanny(os.environ, _nanny_environ(worker))
    _, gpus = offered_slots(worker)
    env = rank_environment.server_environment(environ)
    folder = _server_folder(worker.scheduler.address, env)
    server = SharedRankServerClient(folder, env)
    scratch = Path(worker.local_directory) / attached_plugin(run_id)
    try:
        return RankHost(server, lambda: SharedRankServerClient(folder, env), environ, gpus, scratch)
    except BaseException:
        server.listen()
        server.close()
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _remove_host(host: RankHost) -> None:
    """Stop the run's ranks and delete its files. Other runs may still use the rank server."""
    host.server.close()
    host.server.wait(deadlines.HOST_END_S)
    shutil.rmtree(host.scratch, ignore_errors=True)


def _nanny_environ(worker: Worker) -> dict[str, object]:
    """Return the variables that the worker's nanny has exported; empty if it has no nanny."""
    if worker.nanny is None:
        return {}
    exported = (dask.config.get(f"distributed.nanny.{part}", {}) for part in ("pre-spawn-environ", "environ"))
    return {name: value for part in exported for name, value in part.items()} | _NANNY_HASH_SEED


def _server_folder(scheduler: str, env: Mapping[str, str]) -> Path:
    """Return the folder of the shared rank server. Workers have the same folder if they can use the same server."""
    identity = [scheduler, sys.executable, sys.prefix, __version__, exec_only(env), _container_identity()]
    digest = sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"ddptrain-{os.getuid()}-{digest}"


def _container_identity() -> list[str]:
    """Return namespaces and control group, because different containers and batch jobs may share a temporary folder."""
    namespaces = Path("/proc/self/ns")
    if not namespaces.is_dir():
        return []
    return [*sorted(os.readlink(path) for path in namespaces.iterdir()), Path("/proc/self/cgroup").read_text()]
