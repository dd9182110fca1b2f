"""The environment of a run's ranks: its files on this machine, and its installation on the hosts that lack it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.config.resolved import ResolvedConfig
from ddptrain.errors import ClusterError, UsageError
from ddptrain.file_ops import sha256
from ddptrain.worker.environment import LOCK_FILE, REQUIREMENTS

if TYPE_CHECKING:
    from ddptrain.driver.ranks import RankPlace
    from ddptrain.driver.recorder import Recorder
    from ddptrain.driver.workers import Workers

_PROJECT = "pyproject.toml"
_SETTINGS = "uv.toml"  # of uv, which has precedence over those in the project's file
# Also an option, a comment, or nothing. What follows a semicolon is a condition, as python_version == "3.11".
_PINNED = re.compile(r"\s*(#.*|-.*|[^#;]*(===?(?![^#;]*\*)|@)\s*\S.*)?$")


@dataclass(frozen=True)
class Environment:
    """The files from which uv makes an environment: their texts by name. source: the file that names the packages."""

    source: Path
    files: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of names and contents; hosts with the same platform then have the same packages."""
        return sha256(repr(sorted(self.files.items())).encode()).hexdigest()

    def install(
        self, workers: Workers, places: Sequence[RankPlace], variables: Mapping[str, str], recorder: Recorder
    ) -> None:
        """Start the ranks on these workers from the environment; install it once on each host that lacks it.

        variables: the run's own; those of uv are passed on. Raises UsageError, ClusterError, which name the worker.
        """
        from ddptrain.worker.driver_calls import use_environment

        hosts = {place.slot.worker: place for place in places}
        found = workers.ask([*hosts], use_environment, workers.run_id, self.digest, {}, {})
        lacking = [worker for worker in hosts if not found[worker]]
        if not lacking:
            return
        of_uv = {name: value for name, value in variables.items() if name.startswith("UV_")}
        first = {hosts[worker].slot.host: worker for worker in reversed(lacking)}
        names = ", ".join(sorted({hosts[worker].hostname for worker in first.values()}))
        recorder.status(f"installing the environment of {self.source} on host {names}")
        began = time.monotonic()
        others = [worker for worker in lacking if worker not in first.values()]  # they find that of their host
        try:
            for group in filter(None, ([*first.values()], others)):
                workers.ask(group, use_environment, workers.run_id, self.digest, dict(self.files), of_uv)
        except ClusterError as error:
            worker, _, reason = str(error).partition(": ")
            name = f" on host {hosts[worker].hostname}" if worker in hosts else ""
            raise ClusterError(f"the environment can't be installed{name}: {reason}") from error
        recorder.notice(f"installed the environment on host {names} in {time.monotonic() - began:.0f} s")


def environment_of(resolved: ResolvedConfig) -> Environment | None:
    """Return the environment that the configuration asks for, or None. Raises UsageError if its files can't be used."""
    asked, beside = resolved.config.code.environment, Path(resolved.import_folders[0])
    if asked is None:
        return None
    if asked == "uv":
        chosen = resolved.config.code.folder
        folders = [Path(chosen).expanduser().resolve()] if chosen is not None else [beside, *beside.parents]
        source = next((path for folder in folders if (path := folder / LOCK_FILE).is_file()), None)
        if source is None:
            where = str(folders[0]) + ("" if chosen is not None else ", nor in a folder above it")
            raise UsageError(f"code.environment is uv, but there is no uv.lock in {where}: make it with `uv lock`")
        settings = [_SETTINGS] if source.with_name(_SETTINGS).is_file() else []
        files = {name: _text(source.with_name(name)) for name in (LOCK_FILE, _PROJECT, *settings)}
        return Environment(source, files)
    candidates = [Path(folder, Path(asked).expanduser()) for folder in resolved.import_folders]
    source = next(filter(Path.is_file, candidates), None)
    if source is None:
        raise UsageError(
            f"code.environment is {asked!r}: there is no such file in {candidates[0].parent}; write uv, or the name of "
            "a requirements file"
        )
    text = _text(source)
    for number, line in enumerate(text.replace("\\\n", "  ").splitlines(), 1):
        if not _PINNED.match(line):
            raise UsageError(
                f"code.environment: {source}:{number}: {line.strip()!r} has no exact version, so hosts may get other "
                f"ones: pin it with ==, or let uv pin all: uv pip compile {source.name} -o {source.stem}.lock.txt"
            )
    return Environment(source, {REQUIREMENTS: text})


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"code.environment: {file} can't be read: {error}") from error
