"""Takes the project's code along to workers that don't see its folder: once a host, and only what is not there yet."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.driver.transfer.code_package import Package
from ddptrain.driver.worker_group import Gang, Place
from ddptrain.errors import ClusterError
from ddptrain.protocol.code_digest import identity
from ddptrain.worker import code_tasks, tasks
from ddptrain.worker.spool import READ_LIMIT_BYTES


@dataclass(frozen=True, slots=True)
class Shipped:
    """The hash of the code that went along, and the folder that each place's worker has it in: "" for the project."""

    code: str
    roots: list[str]


def ship(
    gang: Gang, places: Sequence[Place], package: Package, needed: Path, max_mb: float, tell: Callable[[str], None]
) -> Shipped:
    """Have the project's code where each place's worker finds it: as it is, or in a cache of its host.

    Raises: ClusterError where it could not be brought, UsageError where it is more than `max_mb` or lacks the
    file `needed`.
    """
    host_of = {place.slot.worker: place.hostname for place in places}
    names = package.names
    sample = package.sample
    arguments = (str(package.folder), sample, identity(package.folder, sample))
    # Where nothing would go along, no worker can tell the folder from another one.
    seen = _ask(gang, [*host_of], code_tasks.sees_code, *arguments) if sample else {}
    without = [worker for worker in host_of if not seen.get(worker)]
    found = dict.fromkeys(host_of, "")
    code = ""
    if without:
        package.check(needed, max_mb)
        code = package.hash
        found |= _ask(gang, without, code_tasks.use_code, gang.run_id, code)
    if not all(found[worker] for worker in without):
        archive, code = package.archive()
        for worker in without:
            # Another worker of the host may have been brought it a moment ago.
            found |= _ask(gang, [worker], code_tasks.use_code, gang.run_id, code)
            if not found[worker]:
                tell(f"taking {len(names)} files of {package.folder} along to host {host_of[worker]}")
                found[worker] = _send(gang, worker, names, code, archive)
    return Shipped(code, [found[place.slot.worker] for place in places])


def check_imports(gang: Gang, places: Sequence[Place], file: Path, paths: Sequence[Sequence[str]]) -> None:
    """Compare what a workload's file imports with what its workers have; `paths` is where each looks first.

    Raises: ClusterError that names what is missing, and where.
    """
    modules = sorted(_imported(file))
    lacking: dict[str, list[str]] = {}
    first_on = {place.slot.worker: (place, path) for place, path in zip(places, paths, strict=True)}
    for worker, (place, path) in first_on.items():
        for module in _ask(gang, [worker], code_tasks.missing_modules, modules, list(path))[worker]:
            lacking.setdefault(module, []).append(place.hostname)
    if lacking:
        what = "; ".join(f"{module} on {', '.join(dict.fromkeys(hosts))}" for module, hosts in lacking.items())
        raise ClusterError(
            f"{file} imports what the workers lack: {what}. Install it there (nothing is installed by us)"
        )


def _imported(file: Path) -> set[str]:
    """The first parts of the modules that a file imports whatever happens: those at its top level."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()  # the rank will tell
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
    return found


def _send(gang: Gang, worker: str, names: list[str], code: str, archive: bytes) -> str:
    name = f"code-{code}.tar.gz"
    for offset in range(0, len(archive), READ_LIMIT_BYTES):
        chunk = archive[offset : offset + READ_LIMIT_BYTES]
        _ask(gang, [worker], tasks.write_spool, gang.run_id, name, offset, chunk)
    return str(_ask(gang, [worker], code_tasks.unpack_code, gang.run_id, code, name, names)[worker])


def _ask(gang: Gang, workers: list[str], function: Callable[..., Any], *arguments: object) -> dict[str, Any]:
    try:
        return dict(gang.client.run(function, *arguments, workers=workers))
    except ClusterError:
        raise
    except Exception as error:
        raise ClusterError(f"could not take the code along to {', '.join(workers)}: {error}") from error
