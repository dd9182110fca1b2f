"""Uploads the project's code to workers that do not see its folder: once for each host, and only if it is missing."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.driver.ranks import RankPlace
from ddptrain.driver.transfer.code_package import CodePackage
from ddptrain.driver.workers import Workers
from ddptrain.errors import ClusterError
from ddptrain.protocol.code_digest import inode_digest
from ddptrain.worker import driver_calls
from ddptrain.worker.spool import READ_LIMIT_BYTES


@dataclass(frozen=True, slots=True)
class UploadedCode:
    """`code` is the hash of the uploaded code, "" if none was needed.

    `roots` has, for each place, the folder of the code on its worker; "" if the worker sees the project folder.
    """

    code: str
    roots: list[str]


def upload_code(
    worker_group: Workers,
    places: Sequence[RankPlace],
    package: CodePackage,
    needed: Path,
    max_mb: float,
    tell: Callable[[str], None],
) -> UploadedCode:
    """Make the project's code available to the worker of each place: in its own folder, or in a cache of the host.

    Raises ClusterError if the upload fails; UsageError if the code exceeds `max_mb`, or lacks the file `needed`.
    """
    host_of = {place.slot.worker: place.hostname for place in places}
    arguments = (str(package.folder), package.sample, inode_digest(package.folder, package.sample))
    # An empty sample cannot identify the folder.
    seen = _run_on(worker_group, [*host_of], driver_calls.sees_code, *arguments) if package.sample else {}
    without = [worker for worker in host_of if not seen.get(worker)]
    folders = dict.fromkeys(host_of, "")
    code = ""
    if without:
        package.check(needed, max_mb)
        code = package.hash
        folders |= _run_on(worker_group, without, driver_calls.use_code, code)
    if not all(folders[worker] for worker in without):
        archive, code = package.archive
        for worker in without:
            # It may be in the cache by now: another worker of this host may just have got it.
            folders |= _run_on(worker_group, [worker], driver_calls.use_code, code)
            if not folders[worker]:
                tell(f"uploading {len(package.names)} files of {package.folder} to host {host_of[worker]}")
                folders[worker] = _send(worker_group, worker, package.names, code, archive)
    return UploadedCode(code, [folders[place.slot.worker] for place in places])


def check_imports(
    worker_group: Workers, places: Sequence[RankPlace], file: Path, paths: Sequence[Sequence[str]]
) -> None:
    """Check that the workers have the modules that a workload's file imports; `paths` are their search paths.

    Raises ClusterError with the missing modules and their hosts.
    """
    modules = sorted(_imported(file))
    lacking: dict[str, list[str]] = {}
    first_on = {place.slot.worker: (place, path) for place, path in zip(places, paths, strict=True)}
    for worker, (place, path) in first_on.items():
        for module in _run_on(worker_group, [worker], driver_calls.missing_modules, modules, list(path))[worker]:
            lacking.setdefault(module, []).append(place.hostname)
    if lacking:
        what = "; ".join(f"{module} on {', '.join(dict.fromkeys(hosts))}" for module, hosts in lacking.items())
        raise ClusterError(
            f"{file} imports what the workers lack: {what}. Install it there (ddptrain installs nothing)"
        )


def _imported(file: Path) -> set[str]:
    """Return the top-level packages of a file's unconditional imports: those outside of functions, `if` and `try`."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()  # the rank will report the error
    packages = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            packages |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            packages.add(node.module.partition(".")[0])
    return packages


def _send(worker_group: Workers, worker: str, names: list[str], code: str, archive: bytes) -> str:
    """Send the archive in chunks, and return the folder in which the worker has unpacked it."""
    name = f"code-{code}.tar.gz"
    for offset in range(0, len(archive), READ_LIMIT_BYTES):
        chunk = archive[offset : offset + READ_LIMIT_BYTES]
        _run_on(worker_group, [worker], driver_calls.write_spool, worker_group.run_id, name, offset, chunk)
    return str(
        _run_on(worker_group, [worker], driver_calls.unpack_code, worker_group.run_id, code, name, names)[worker]
    )


def _run_on(
    worker_group: Workers, workers: list[str], function: Callable[..., Any], *arguments: object
) -> dict[str, Any]:
    """Run a function on these workers; return the results by worker. Raises ClusterError, which names the worker."""
    try:
        answers = dict(worker_group.client.run(function, *arguments, workers=workers, on_error="return"))
    except ClusterError:
        raise
    except Exception as error:  # Dask raises any type if the scheduler has ended
        answers = {", ".join(workers): error}
    for worker, answer in answers.items():
        if isinstance(answer, Exception):
            raise ClusterError(f"could not upload the code to {worker}: {answer}") from answer
    return answers
