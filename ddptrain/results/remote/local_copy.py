"""Marks a folder as the local copy of a run in an object store, with its address there and a list of its files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddptrain.results.secure_files import read_bytes, write_file

ORIGIN = ".store.json"


@dataclass(frozen=True, slots=True)
class Origin:
    """The run in a store of which a folder is a copy.

    token: only in a driver's working folder: the token of this driver's lease.
    alive: only in a reader's copy: whether the driver was alive when the copy was made.
    files: only in a reader's copy: path -> size in bytes of the files in the store, which the copy may lack.
    """

    url: str
    token: str = ""
    alive: bool | None = None
    files: Mapping[str, int] = field(default_factory=dict)

    def mark(self, folder: Path) -> None:
        """Write the mark into the folder. Raises ResultsError."""
        write_file(folder / ORIGIN, (json.dumps(dataclasses.asdict(self), indent=1) + "\n").encode())


def origin_of(folder: Path) -> Origin | None:
    """Return the original of a folder; None if the folder is an original itself."""
    try:
        raw = json.loads(read_bytes(folder / ORIGIN))
        alive = raw["alive"] if isinstance(raw["alive"], bool) else None
        files = {str(path): int(size_bytes) for path, size_bytes in raw["files"].items()}
        return Origin(str(raw["url"]), str(raw["token"]), alive, files)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def where_of(folder: Path) -> str:
    """Return the folder for messages: the address of its original, or else its path."""
    origin = origin_of(folder)
    return origin.url if origin is not None else str(folder)
