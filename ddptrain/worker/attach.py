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

import dask
from distributed import Worker

from ddptrain import __version__
from ddptrain.errors import ClusterError
from ddptrain.execenv import exec_only
from ddptrain.gpus import visible_gpus
from ddptrain.spec import GPU_RESOURCE, SLOT_RESOURCE, attached_plugin
from ddptrain.worker import environment
from ddptrain.worker.host import AttachedHost, RankHost, RunGuest, own_host, rank_host
from ddptrain.worker.server import SharedRankServer

# Exported by every nanny, without standing in Dask's configuration (distributed/nanny.py).
_NANNY_HASH_SEED = {"PYTHONHASHSEED": "6640"}


async def attach(worker: Worker, run_id: str) -> RankHost:
    """Have a plugin stand for the run on this worker; return the host of its ranks.

    A worker of ours is a host already. Removing the plugin (Dask's "plugin-remove") ends the run here.
    Raises RankServerLost, ClusterError.
    """
    name = attached_plugin(run_id)
    if name not in worker.plugins:
        own = own_host(worker) is not None
        plugin = RunGuest(run_id) if own else await asyncio.to_thread(_new_host, worker, run_id)
        answer = await worker.plugin_add(plugin, name=name)
        if answer["status"] != "OK":
            raise ClusterError(f"the worker {worker.address} took no plugin: {answer}")
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


def _new_host(worker: Worker, run_id: str) -> AttachedHost:
    environ = environment.without_nanny(os.environ, _nannys(worker))
    _, gpus = offered(worker)
    scratch = Path(worker.local_directory) / attached_plugin(run_id)
    env = environment.server_environment(environ)
    folder = _server_folder(worker.scheduler.address, env)
    server = SharedRankServer(folder, env)
    try:
        host = AttachedHost(server, lambda: SharedRankServer(folder, env), environ, gpus, scratch)
    except BaseException:
        server.listen()
        server.close()
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    host.name = attached_plugin(run_id)
    return host


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
