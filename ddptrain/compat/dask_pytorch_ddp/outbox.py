"""Results that wait on a worker's host for the client: a folder (box) per job; a data file and an entry per result."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributed import Worker

from ddptrain.file_ops import sha256, write_atomic
from ddptrain.protocol.rank_spec import attached_plugin, key_prefix
from ddptrain.worker.spool import read_chunk

VARIABLE = "DDPTRAIN_RESULTS"  # environment variable of a job's ranks: the folder of their results
_FOLDER = "ddptrain-results"
_DATA, _ENTRY = ".data", ".json"
_NAME = re.compile(r"\d{20}-\d+-\d+")
_MAX_LISTED = 200
_CLEAN_UP_S = 5.0
_BLOCK_BYTES = 8 << 20
_counter = itertools.count()


def box_of(key: str) -> str:
    """Return the folder name for the results of a Dask task: one for all ranks of a job, or one per task."""
    run_id = key.partition("/")[2].partition("/")[0]
    return run_id if run_id and key.startswith(key_prefix(run_id)) else sha256(key.encode()).hexdigest()[:32]


def make_box(worker: Worker, box: str) -> Path:
    """Create the folder of a box on this worker, and return it."""
    root = Path(worker.local_directory) / _FOLDER
    folder = root / box
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def put(folder: Path, key: str, path: str, data: memoryview) -> None:
    """Write a result to a box, atomically. Raises OSError."""
    name = f"{time.time_ns():020d}-{os.getpid()}-{next(_counter)}"
    digest = sha256()
    with (folder / f"{name}{_DATA}").open("xb") as file:
        for start in range(0, len(data), _BLOCK_BYTES):
            block = data[start : start + _BLOCK_BYTES]
            digest.update(block)
            file.write(block)
    entry = {"key": key, "path": path, "size_bytes": len(data), "sha256": digest.hexdigest()}
    write_atomic(folder / f"{name}{_ENTRY}", json.dumps(entry).encode(), durable=False)


# --- for client.run ---


async def look(boxes: Sequence[str], key: str, done: Sequence[str], dask_worker: Worker) -> list[dict[str, Any]]:
    """Remove the results `done`; list the oldest 200 with that key: name ("box/name"), path, size_bytes, sha256."""
    root = Path(dask_worker.local_directory) / _FOLDER
    return await asyncio.to_thread(_look, root, boxes, key, done)


def _look(root: Path, boxes: Sequence[str], key: str, done: Sequence[str]) -> list[dict[str, Any]]:
    for name in done:
        for ending in (_ENTRY, _DATA):
            _file(root, name, ending).unlink(missing_ok=True)
    entries = []
    for box in boxes:
        for path in sorted((root / box).glob(f"*{_ENTRY}")):
            entry = json.loads(path.read_text(encoding="utf-8"))
            if entry.pop("key") == key:
                entries.append({"name": f"{box}/{path.stem}", **entry})
    return sorted(entries, key=lambda entry: str(entry["name"]).partition("/")[2])[:_MAX_LISTED]


async def read(name: str, offset: int, size_bytes: int, dask_worker: Worker) -> bytes:
    """Return bytes of a result. Raises ValueError if there is no such result."""
    path = data_file(Path(dask_worker.local_directory) / _FOLDER, name)
    return await asyncio.to_thread(read_chunk, path, offset, size_bytes)


async def sweep(boxes: Sequence[str], dask_worker: Worker) -> None:
    """Remove empty boxes, and wait until their jobs are cleaned up, because the user may stop the worker next."""
    local = Path(dask_worker.local_directory)
    deadline = time.monotonic() + _CLEAN_UP_S
    for box in boxes:
        with suppress(OSError):
            (local / _FOLDER / Path(box).name).rmdir()
        while (local / attached_plugin(box)).exists() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # a thread removes it


def data_file(root: Path, name: str) -> Path:
    """Return the data file of an entry's name "box/name". Raises ValueError for other names."""
    return _file(root, name, _DATA)


def _file(root: Path, name: str, ending: str) -> Path:
    box, _, stem = name.partition("/")
    if Path(box).name != box or not _NAME.fullmatch(stem):
        raise ValueError(f"no result has the name {name!r}")
    return root / box / f"{stem}{ending}"
