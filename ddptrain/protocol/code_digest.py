"""Digests of a code folder: driver and workers compare them to find out whether they have the same files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ddptrain.file_ops import hash_file, sha256


def hash_line(kind: str, name: str, digest: str) -> bytes:
    """Return the line of a file in the hashed text; `kind` is "file", "program" or "link"."""
    return f"{kind} {digest} {name}\n".encode("utf-8", "surrogateescape")


def kind_of(mode: int) -> str:
    """Return the kind of a regular file with that mode."""
    return "program" if mode & stat.S_IXUSR else "file"


def content_hash(folder: Path, names: Iterable[str]) -> str:
    """Return the SHA-256 of names, contents and executable bits. Raises OSError if a file can't be read."""
    digest = sha256()
    for name in sorted(names):
        path = f"{folder}/{name}"  # a Path for each costs as much as reading a small file
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            digest.update(hash_line("link", name, sha256(os.fsencode(link_target(Path(path)))).hexdigest()))
        else:
            digest.update(hash_line(kind_of(mode), name, hash_file(path)[1]))
    return digest.hexdigest()


def link_target(path: Path) -> str:
    """Return the target of a symbolic link relative to its folder, so that it is valid in a copy of the folder."""
    target = os.readlink(path)
    return os.path.relpath(target, path.parent) if os.path.isabs(target) else target


def inode_digest(folder: Path, names: Iterable[str]) -> str:
    """Return a digest of the files' inodes, which is equal on all hosts that see the same folder; "" if one is missing.

    Sizes and times are not part of it: a log in the folder may grow meanwhile.
    """
    digest = sha256()
    try:
        for name in sorted(names):
            digest.update(f"{os.lstat(f'{folder}/{name}').st_ino} {name}\n".encode("utf-8", "surrogateescape"))
    except OSError:
        return ""
    return digest.hexdigest()


def move_path(path: str, folder: Path, root: str) -> str:
    """Return a path below `folder` as a path below `root`; other paths, or without a root, are not changed."""
    if not root or not Path(path).is_relative_to(folder):
        return path
    return str(Path(root) / Path(path).relative_to(folder))
