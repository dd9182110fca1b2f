"""Copies a folder of the driver to a worker that does not see it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distributed import Client

from ddptrain.file_ops import sha256
from ddptrain.worker import driver_calls
from ddptrain.worker.spool import READ_LIMIT_BYTES


def copy_folder(client: Client, run_id: str, worker: str, folder: Path, files: Sequence[str]) -> str:
    """Copy these files of a folder to the run's scratch folder on a worker; return the path of the copy there.

    Folders with the same name in different places get different copies.

    Raises OSError, and any exception of Dask if the worker is lost.
    """
    target = ""
    copy = f"brought-{sha256(str(folder).encode()).hexdigest()[:8]}-{folder.name}"
    for name in files:
        with (folder / name).open("rb") as file:
            offset = 0
            while (data := file.read(READ_LIMIT_BYTES)) or not offset:
                path = f"{copy}/{name}"
                answer = client.run(driver_calls.write_spool, run_id, path, offset, data, workers=[worker])
                target = str(Path(answer[worker]).parent)
                offset += len(data)
                if not data:
                    break
    return target
