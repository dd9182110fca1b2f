"""The functions that the driver calls on a worker with `Client.run`.

They are coroutines: Dask accepts only coroutines with `wait=False`, and other functions would block its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

from distributed import Worker

from ddptrain.errors import ClusterError
from ddptrain.file_ops import publish
from ddptrain.host_identity import file_view
from ddptrain.protocol import commands
from ddptrain.protocol.code_digest import inode_digest
from ddptrain.protocol.commands import Command
from ddptrain.protocol.rank_spec import key_prefix
from ddptrain.worker import environment, spool, stack_reports
from ddptrain.worker.rank_host import attach, offered_slots, own_host, rank_host
from ddptrain.worker.rank_server_client import RankServerLost
from ddptrain.worker.tcp_timeouts import apply_tcp_timeout

_WARM_POLL_S = 0.02


async def describe_host(run_id: str, dask_worker: Worker, lost_after_s: float | None = None) -> dict[str, str]:
    """Attach the run to the worker, if it is not attached yet, and return a description of the worker's host.

    From now on the worker's connections survive a network cut of `lost_after_s` seconds (None: no change). "token" is
    the content of the file "token" in the folder "scratch"; a driver that can read it shares the worker's file system.
    Raises RankServerLost, ClusterError.
    """
    host = await attach(dask_worker, run_id)
    if lost_after_s is not None:
        apply_tcp_timeout(dask_worker, lost_after_s)
    return {
        "scratch": str(host.scratch),
        "token": host.token,
        "pid": str(os.getpid()),
        "hostname": socket.gethostname(),
        "interface": host.interface or "",
        "gpus": ",".join(host.gpus),
        "files": file_view(),
    }


async def stop_ranks(run_id: str, keys: list[str], grace_s: float | None, dask_worker: Worker) -> None:
    """Stop the ranks with these keys that run on this worker. `grace_s` None means the run's own grace period."""
    with contextlib.suppress(RankServerLost):  # no ranks run any more
        host = rank_host(dask_worker, run_id)
        for key in keys:
            host.stop(key, grace_s)


async def send_command(run_id: str, keys: list[str], order: str, dask_worker: Worker) -> None:
    """Send a command to the ranks with these keys that run on this worker. Raises CommandError."""
    command, _ = commands.decode(order)
    with contextlib.suppress(RankServerLost):  # no ranks run any more
        host = rank_host(dask_worker, run_id)
        for key in keys:
            server = host.server_of(key)
            if command is Command.STACKS and (started := server.start_of(key)) is not None:
                attempt, rank = (int(part) for part in key.removeprefix(key_prefix(run_id)).split("/"))
                files = spool.rank_spool(host.scratch, run_id, attempt, rank)
                stack_reports.report_stacks(files, started[0], attempt, rank)
            server.send_command(key, order)


async def read_spool(path: str, offset: int, size_bytes: int) -> bytes:
    """Return bytes of a file on the worker's host."""
    return await asyncio.to_thread(spool.read_chunk, Path(path), offset, size_bytes)


async def holds_file(path: str, text: str) -> bool:
    """Return whether this worker sees the driver's file: one with this path and content."""

    def is_equal() -> bool:
        try:
            return Path(path).read_text(encoding="utf-8") == text
        except (OSError, UnicodeDecodeError):
            return False

    return await asyncio.to_thread(is_equal)


async def write_spool(run_id: str, path: str, offset: int, data: bytes, dask_worker: Worker) -> str:
    """Write into the file `path` below the run's scratch folder; return its absolute path."""
    return await asyncio.to_thread(
        spool.write_chunk, rank_host(dask_worker, run_id).scratch / run_id / path, offset, data
    )


async def give_specs(run_id: str, attempt: int, data: bytes, dask_worker: Worker) -> None:
    """Keep the specs of an attempt until the task of its ranks takes them. `data`: compressed JSON, by rank."""
    host = rank_host(dask_worker, run_id)
    host.keep_specs(run_id, attempt, {int(rank): text for rank, text in json.loads(zlib.decompress(data)).items()})


async def describe_offer(dask_worker: Worker) -> tuple[int, int]:
    """Return the numbers of slots and GPUs."""
    slots, gpus = await asyncio.to_thread(offered_slots, dask_worker)
    return slots, len(gpus)


async def wait_until_warm(timeout_s: float, dask_worker: Worker) -> dict[str, Any]:
    """Wait at most `timeout_s` until the rank server is warm, that is, has imported torch, or has failed.

    Return {"ours", "warm", "fault"}. A foreign worker answers at once, because it has no rank server until a run is
    attached.
    """
    host = own_host(dask_worker)
    deadline = time.monotonic() + timeout_s
    while host is not None and not host.server.ready.is_set() and host.server.fault is None:
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(_WARM_POLL_S)
    if host is None:
        return {"ours": False, "warm": False, "fault": None}
    return {"ours": True, "warm": host.metric(dask_worker)["warm"], "fault": host.server.fault}


async def sees_code(folder: str, names: list[str], expected: str) -> bool:
    """Return whether this worker sees the same files in a folder as the driver, and not a copy of them."""
    return await asyncio.to_thread(inode_digest, Path(folder), names) == expected


async def unpack_code(archive: str, code: str) -> str:
    """Unpack an archive beside itself, unless another worker or attempt has; return the folder, which is named `code`.

    Raises ClusterError.
    """
    return await asyncio.to_thread(_unpack, Path(archive), code)


def _unpack(archive: Path, code: str) -> str:
    folder = archive.with_name(code)
    if not folder.is_dir():
        try:
            with tempfile.TemporaryDirectory(dir=archive.parent) as incoming, tarfile.open(archive, "r:gz") as file:
                file.extractall(Path(incoming, code), filter="data")
                publish(Path(incoming, code), folder)
        except (OSError, tarfile.TarError) as error:
            if not folder.is_dir():  # else another worker was faster
                raise ClusterError(f"cannot unpack the uploaded code into {folder}: {error}") from error
    return str(folder)


async def use_environment(
    run_id: str, digest: str, files: dict[str, str], variables: dict[str, str], dask_worker: Worker
) -> str:
    """Start the ranks of the run from the environment of that digest, which is installed here if `files` are given.

    files: its files by name. variables: for uv, beside the worker's environment. Return its Python; "" if it is not
    installed. Raises UsageError, ClusterError.
    """
    host = rank_host(dask_worker, run_id)

    def use() -> str:
        found = environment.hold(digest)
        if found is None and files:
            environment.install(digest, files, {**host.environ, **variables})
            found = environment.hold(digest)
        if found is not None:
            host.use_python(run_id, *found)
        return found[0] if found is not None else ""

    return await asyncio.to_thread(use)


async def read_clock() -> float:
    """Return the time of this host's clock, in seconds since 1970."""
    return time.time()


async def host_facts(timeout_s: float, dask_worker: Worker) -> str:
    """Return the HostFacts of this host as JSON.

    Raises ClusterError if the process that reads them fails or is late.
    """
    host = own_host(dask_worker)
    scratch = str(host.scratch) if host is not None else dask_worker.local_directory
    environ = host.environ if host is not None else dict(os.environ)
    command = [sys.executable, "-P", "-m", "ddptrain.worker.host_facts", scratch]
    return await asyncio.to_thread(_output_of, command, environ, timeout_s)


def _output_of(command: list[str], environ: dict[str, str], timeout_s: float) -> str:
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"the facts of the host could not be read within {timeout_s:g} s") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ClusterError(f"the facts of the host could not be read: {last[0]}")
    return done.stdout
