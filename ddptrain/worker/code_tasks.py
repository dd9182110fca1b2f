"""What the driver has a worker do about code that comes along: look whether it is there, unpack it, and keep it."""

from __future__ import annotations

import asyncio
import importlib
import importlib.machinery
import importlib.util
from pathlib import Path

from distributed import Worker

from ddptrain.protocol.code_digest import identity
from ddptrain.worker.code_cache import CodeCache
from ddptrain.worker.foreign_worker import rank_host


async def sees_code(folder: str, names: list[str], expected: str) -> bool:
    """For client.run: whether this worker sees the driver's own folder: the same files, not a copy of them."""
    return await asyncio.to_thread(identity, Path(folder), names) == expected


async def use_code(run_id: str, code: str) -> str:
    """For client.run: the folder of code that has come along before, held for the run; "" where it has not."""
    return await asyncio.to_thread(CodeCache().use, run_id, code)


async def unpack_code(run_id: str, code: str, archive: str, names: list[str], dask_worker: Worker) -> str:
    """For client.run: unpack an archive from the run's scratch folder; return its folder. Raises ClusterError."""
    path = rank_host(dask_worker, run_id).scratch / run_id / archive
    try:
        return await asyncio.to_thread(CodeCache().unpack, run_id, code, path, names)
    finally:
        path.unlink(missing_ok=True)


async def missing_modules(modules: list[str], folders: list[str]) -> list[str]:
    """For client.run: those of the modules that are neither in the folders nor installed here; none is imported."""
    importlib.invalidate_caches()
    return [module for module in modules if not _is_found(module, folders)]


def _is_found(module: str, folders: list[str]) -> bool:
    if importlib.machinery.PathFinder.find_spec(module, folders) is not None:
        return True
    try:
        return importlib.util.find_spec(module) is not None  # asks every finder: an editable install has its own
    except (ImportError, ValueError):  # it is loaded and has no spec, as __main__
        return True
