"""Pictures of tables on the disk: wandb copies each into every artifact that shows it, here they are one file."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def one_of_each(pictures: Iterable[Path]) -> Iterator[None]:
    """Have the copies of these pictures that wandb makes in the block be further names of them. Raises nothing itself.

    Not for a run that is online: wandb takes its copies away once they are sent, which may be before the block ends.
    """
    folder = Path(os.environ.get("WANDB_DATA_DIR", "")) / "artifacts" / "staging"
    before = {*_entries(folder)}
    yield
    with suppress(OSError):  # they stay copies
        known: dict[tuple[int, bytes], Path] = {_content(path): path for path in pictures}
        for copy in _entries(folder) - before:
            if _is_complete(copy) and (content := _content(copy)) in known:
                known[content] = _one_file(known[content], copy)


def _entries(folder: Path) -> set[Path]:
    try:
        return {*folder.iterdir()}
    except OSError:
        return set()


def _is_complete(copy: Path) -> bool:
    """Other ranks of this host make theirs in the same folder; wandb makes them read-only at last."""
    mode = copy.lstat().st_mode
    return stat.S_ISREG(mode) and stat.S_IMODE(mode) == stat.S_IRUSR


def _content(path: Path) -> tuple[int, bytes]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").digest()


def _one_file(original: Path, copy: Path) -> Path:
    """Have the copy be another name of the original, if that may be; returns what further copies may become."""
    beside = copy.with_name(f"{copy.name}-{secrets.token_hex(4)}")
    try:
        os.link(original, beside)
    except OSError:  # it is on another disk
        return copy
    os.replace(beside, copy)
    return original
