"""What a folder of code is, for the driver that sends it and the workers that have it: its content, or its files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ddptrain.file_ops import hash_file, sha256


def line_of(kind: str, name: str, digest: str) -> bytes:
    """A file's line in what is hashed: whether it is a "file", a "program" or a "link", and of which content."""
    return f"{kind} {digest} {name}\n".encode("utf-8", "surrogateescape")


def kind_of(mode: int) -> str:
    """What the mode of a plain file makes it."""
    return "program" if mode & stat.S_IXUSR else "file"


def content_hash(folder: Path, names: Iterable[str]) -> str:
    """SHA-256 over the files' names, contents and whether they can be run. Raises OSError where one can't be read."""
    whole = sha256()
    for name in sorted(names):
        path = f"{folder}/{name}"  # a Path for each costs as much as reading a small file
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            whole.update(line_of("link", name, sha256(os.fsencode(link_target(Path(path)))).hexdigest()))
        else:
            whole.update(line_of(kind_of(mode), name, hash_file(path)[1]))
    return whole.hexdigest()


def link_target(path: Path) -> str:
    """Where a symbolic link leads, seen from its own folder: that stays right when the whole folder moves."""
    target = os.readlink(path)
    return os.path.relpath(target, path.parent) if os.path.isabs(target) else target


def identity(folder: Path, names: Iterable[str]) -> str:
    """A digest of the files' inodes: who sees the same folder gets the same; "" where one is missing.

    Not of their sizes or times: a log that lies there grows while we look.
    """
    whole = sha256()
    try:
        for name in sorted(names):
            whole.update(f"{os.lstat(f'{folder}/{name}').st_ino} {name}\n".encode("utf-8", "surrogateescape"))
    except OSError:
        return ""
    return whole.hexdigest()


def looks(folder: Path, names: Iterable[str]) -> str:
    """A digest of the files' sizes and times of change, which tells of a change to them; "" where one is missing."""
    whole = sha256()
    try:
        for name in sorted(names):
            status = os.lstat(f"{folder}/{name}")
            whole.update(f"{status.st_size} {status.st_mtime_ns} {name}\n".encode("utf-8", "surrogateescape"))
    except OSError:
        return ""
    return whole.hexdigest()


def moved(path: str, folder: Path, root: str) -> str:
    """Where a path below `folder` is once that is `root`; any other path, and any with no root, as it is."""
    if not root or not Path(path).is_relative_to(folder):
        return path
    return str(Path(root) / Path(path).relative_to(folder))
