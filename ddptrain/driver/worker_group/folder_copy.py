"""Copies a folder of the driver to workers that do not see it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distributed import Client

from ddptrain.errors import ClusterError
from ddptrain.file_ops import sha256
from ddptrain.worker import driver_calls
from ddptrain.worker.spool import READ_LIMIT_BYTES


def copy_folder(
    client: Client, run_id: str, workers: Sequence[str], folder: Path, files: Sequence[str]
) -> dict[str, str]:
    """Copy these files of a folder to the run's scratch folder on each worker; return the path of each copy.

    Folders with the same name in different places get different copies.

    Raises ClusterError, which names the worker, and OSError.
    """
    copies: dict[str, str] = {}
    copy = f"brought-{sha256(str(folder).encode()).hexdigest()[:8]}-{folder.name}"
    for name in files:
        with (folder / name).open("rb") as file:
            offset = 0
            while (data := file.read(READ_LIMIT_BYTES)) or not offset:
                path = f"{copy}/{name}"
                answers = client.run(
                    driver_calls.write_spool, run_id, path, offset, data, workers=list(workers), on_error="return"
                )
                for worker, answer in answers.items():
                    if isinstance(answer, BaseException):
                        raise ClusterError(f"{worker}: {answer}") from answer
                    copies[worker] = str(Path(answer).parent)
                offset += len(data)
                if not data:
                    break
    return copies
