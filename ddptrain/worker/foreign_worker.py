"""Workers that others have started: what they offer, and how one becomes a host of ranks for the length of a run."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dask
from distributed import Worker, WorkerPlugin

from ddptrain import __version__
from ddptrain.gpus import visible_gpus
from ddptrain.protocol.exec_env import exec_only
from ddptrain.protocol.rank_spec import GPU_RESOURCE, SLOT_RESOURCE, attached_plugin
from ddptrain.worker import code_cache, environment
from ddptrain.worker.rank_host import RankHost, own_host
from ddptrain.worker.rank_server_client import RankServerLost, SharedRankServer

# Exported by every nanny, without standing in Dask's configuration (distributed/nanny.py).
_NANNY_HASH_SEED = {"PYTHONHASHSEED": "6640"}
_END_TIMEOUT_S = 5.0  # for ranks to end once their rank server was told to: SIGKILL comes after 2 s


class RunPlugin(WorkerPlugin):
    """Stands for a run on a worker; Dask's "plugin-remove" ends the run there, with all that it has left."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.name = attached_plugin(run_id)
        self.host: RankHost | None = None
        self._own = False  # the host is the worker's own, and stays
        self._removed = False

    async def setup(self, worker: Worker) -> None:
        """Have a host of ranks: the worker's own, or one for this run. Raises RankServerLost, ClusterError."""
        host = own_host(worker)
        self._own = host is not None
        if host is None:
            host = await asyncio.to_thread(_new_host, worker, self.run_id)
            host.setup(worker)
        self.host = host
        if self._removed:  # meanwhile: its driver is gone
            await self.teardown(worker)

    async def teardown(self, worker: Worker) -> None:
        """The run is over, or its driver is gone."""
        self._removed = True
        code_cache.release(self.run_id)
        host, self.host = self.host, None
        if host is not None and self._own:
            await asyncio.to_thread(host.remove_run, self.run_id)
        elif host is not None:
            await asyncio.to_thread(_clear, host)

    def transition(self, key: Any, start: str, finish: str, **more: Any) -> None:
        """A host that is the worker's own hears of it by itself."""
        if self.host is not None and not self._own:
            self.host.transition(key, start, finish, **more)


def rank_host(worker: Worker, run_id: str) -> RankHost:
    """The host of a run's ranks on this worker: the worker's own, or the one attached for the run.

    Raises RankServerLost where the run has been removed from this worker, or was never there.
    """
    plugin = worker.plugins.get(attached_plugin(run_id))
    host = own_host(worker) or (plugin.host if isinstance(plugin, RunPlugin) else None)
    if host is None:
        raise RankServerLost(f"the worker {worker.address} knows nothing of run {run_id} (any more)")
    return host


async def attach(worker: Worker, run_id: str) -> RankHost:
    """Make this worker a host of the run's ranks, where it is none. Raises RankServerLost, ClusterError."""
    name = attached_plugin(run_id)
    if name not in worker.plugins:
        try:
            await worker.plugin_add(RunPlugin(run_id), name=name, catch_errors=False)
        except BaseException:
            worker.plugins.pop(name, None)
            raise
    host = rank_host(worker, run_id)
    await asyncio.to_thread(host.mend)
    return host


def offered(worker: Worker) -> tuple[int, tuple[str, ...]]:
    """How many ranks this worker takes at once, and the GPUs of the first of them.

    Ours, and any that was started with the resource "slot": as many as that says. Any other: one, on the first GPU
    of its own CUDA_VISIBLE_DEVICES (dask-cuda rotates that list for each of its workers) or of its resource "GPU".
    """
    resources = worker.state.total_resources
    host = own_host(worker)
    if host is not None:
        slots = int(resources[SLOT_RESOURCE])
        return slots, host.gpus[:slots]
    with_device = int(resources.get(GPU_RESOURCE, 0))
    if SLOT_RESOURCE in resources:
        slots = min(int(resources[SLOT_RESOURCE]), worker.state.nthreads)
    else:
        slots, with_device = 1, max(with_device, int("CUDA_VISIBLE_DEVICES" in os.environ))
    return slots, visible_gpus(os.environ)[: min(slots, with_device)] if with_device else ()


def _new_host(worker: Worker, run_id: str) -> RankHost:
    environ = environment.without_nanny(os.environ, _nannys(worker))
    _, gpus = offered(worker)
    env = environment.server_environment(environ)
    folder = _server_folder(worker.scheduler.address, env)
    server = SharedRankServer(folder, env)
    scratch = Path(worker.local_directory) / attached_plugin(run_id)
    try:
        return RankHost(server, lambda: SharedRankServer(folder, env), environ, gpus, scratch)
    except BaseException:
        server.listen()
        server.close()
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _clear(host: RankHost) -> None:
    """End a run's ranks, leave the rank server to others, and delete what the run wrote."""
    host.server.close()
    host.server.wait(_END_TIMEOUT_S)
    shutil.rmtree(host.scratch, ignore_errors=True)


def _nannys(worker: Worker) -> dict[str, object]:
    """What the worker's nanny has exported; nothing where it has none."""
    if worker.nanny is None:
        return {}
    exported = (dask.config.get(f"distributed.nanny.{part}", {}) for part in ("pre-spawn-environ", "environ"))
    return {name: value for part in exported for name, value in part.items()} | _NANNY_HASH_SEED


def _server_folder(scheduler: str, env: Mapping[str, str]) -> Path:
    """Where workers of a host and a cluster meet, if a fork of one server is as good for each as one of its own."""
    alike = [scheduler, sys.executable, sys.prefix, __version__, exec_only(env), _surroundings()]
    digest = hashlib.sha256(json.dumps(alike, sort_keys=True).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"ddptrain-{os.getuid()}-{digest}"


def _surroundings() -> list[str]:
    """Namespaces and control group: containers, network namespaces and batch jobs may share a folder for files."""
    namespaces = Path("/proc/self/ns")
    if not namespaces.is_dir():
        return []
    return [*sorted(os.readlink(path) for path in namespaces.iterdir()), Path("/proc/self/cgroup").read_text()]
