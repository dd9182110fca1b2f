"""The mark of a folder that is the local copy of one in an object store: its address there, and what it lacks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddptrain.results.files import read_bytes, write_whole

ORIGIN = ".store.json"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a folder's original is.

    token: of the driver that writes the original, where this is its working folder.
    alive: whether a driver was at work on it, where this is a reader's copy.
    files: path -> size in bytes of what the original holds, where this is a reader's copy, which need not hold it.
    """

    url: str
    token: str = ""
    alive: bool | None = None
    files: Mapping[str, int] = field(default_factory=dict)

    def mark(self, folder: Path) -> None:
        """Write it into the folder. Raises ResultsError."""
        write_whole(folder / ORIGIN, (json.dumps(dataclasses.asdict(self), indent=1) + "\n").encode())


def origin_of(folder: Path) -> Origin | None:
    """What the folder is a copy of; None where it is an original."""
    try:
        raw = json.loads(read_bytes(folder / ORIGIN))
        alive = raw["alive"] if isinstance(raw["alive"], bool) else None
        files = {str(path): int(size_bytes) for path, size_bytes in raw["files"].items()}
        return Origin(str(raw["url"]), str(raw["token"]), alive, files)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def where_of(folder: Path) -> str:
    """The folder as people know it: the address that it is a copy of, or else its path."""
    origin = origin_of(folder)
    return origin.url if origin is not None else str(folder)
