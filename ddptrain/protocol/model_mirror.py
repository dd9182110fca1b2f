"""What a mirror of the model registry gets. A mirror is a function that makes another registry equal to this one.

    def mirror(model: MirroredModel) -> None: ...

It is called after each change of an alias, in a process of its own. It gets the present state, not the change. So it
must add only what the other registry lacks: it is called again if it failed, or was killed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class MirroredVersion:
    """A version that has an alias.

    sha256: the digest of the paths and SHA-256 of all files; another registry's version with the same number and
    digest is this one. record: the data of version.json (metrics, run_id, step, workload, ...). files: the paths below
    the folder that open() returns. open: returns the folder of this machine with the files, after a comparison with
    their hashes. Raises RegistryDamaged, StoreError.
    """

    number: int
    aliases: tuple[str, ...]
    sha256: str
    record: Mapping[str, Any]
    files: tuple[str, ...]
    open: Callable[[], Path]


@dataclass(frozen=True, slots=True)
class MirroredModel:
    """A model of the registry, with its versions that have an alias; the champion is the first.

    reason: of the last change, for people. removed_alias: the alias that the last change has removed, or "".
    options: those of the configuration. timeout_s: seconds from the start of the call to the end of its process.
    tell: shows the user one line.
    """

    name: str
    versions: tuple[MirroredVersion, ...]
    reason: str = ""
    removed_alias: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    timeout_s: float = 60.0
    tell: Callable[[str], None] = print


@dataclass(frozen=True, slots=True)
class MirrorRequest:
    """The request to the process that calls a mirror. folders: where modules of the user are looked for."""

    mirror: str
    registry: str
    model: str
    reason: str
    removed_alias: str
    options: Mapping[str, Any]
    timeout_s: float
    folders: Sequence[str]
