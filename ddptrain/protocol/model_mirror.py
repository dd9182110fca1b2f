"""The arguments of a mirror of the model registry. A mirror is a function that copies the registry to another one.

    def mirror(model: MirroredModel) -> None: ...

The mirror is called after each change of an alias, in a process of its own. Its argument is the present state, not the
change. It must add only what the other registry lacks, because it is called again after it failed or was killed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class MirroredVersion:
    """A version that has an alias.

    sha256: the digest of the paths and SHA-256 of all files; another registry's version with the same number and digest
    is this version. record: the data of version.json (metrics, run_id, step, workload, ...). files: the paths below the
    folder that open() returns. open: compares the files with their hashes and returns a local folder that contains
    them; it raises RegistryDamaged or StoreError.
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

    reason: why the last change was made, as text. removed_alias: the alias that the last change has removed, or "".
    options: the mirror's options in the configuration. timeout_s: seconds from the start of the call to the end of its
    process. tell: shows the user one line.
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
    """The request to the process that calls a mirror. folders: the search path for modules of the user."""

    mirror: str
    registry: str
    model: str
    reason: str
    removed_alias: str
    options: Mapping[str, Any]
    timeout_s: float
    folders: Sequence[str]
