"""The code cache of a host: one read-only folder for each version of a project that a driver has uploaded."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

import platformdirs

from ddptrain.errors import ClusterError
from ddptrain.file_ops import make_private, publish, why_not_private
from ddptrain.protocol.code_digest import content_hash

UNUSED_S = 30 * 24 * 3600.0  # code that no attempt has used for so long is deleted
_INCOMING = ".incoming-"


class CodeCache:
    """Folders named by the hash of their content, which only this user can write to."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or platformdirs.user_cache_path("ddptrain") / "code"

    def use(self, code: str) -> str:
        """Return the folder with the content hash `code`; "" if it is missing.

        Raises ClusterError if another user can write to the cache: their code would run.
        """
        folder = self.folder / code
        with contextlib.suppress(FileNotFoundError):
            if problem := why_not_private(self.folder, self.folder.lstat()):
                raise ClusterError(problem)
            os.utime(folder)
            return str(folder)
        return ""

    def unpack(self, code: str, archive: Path, names: Iterable[str]) -> str:
        """Unpack an archive and return the folder. Raises ClusterError, also if the hash is not `code`."""
        incoming = self.folder / f"{_INCOMING}{secrets.token_hex(8)}"
        try:
            make_private(self.folder)
            incoming.mkdir(mode=0o700)
            with tarfile.open(archive, mode="r:gz") as file:
                file.extractall(incoming, filter="data")
            if content_hash(incoming, names) != code:
                raise ClusterError(f"the code was changed while it was packed, or is damaged: its hash is not {code}")
            _make_read_only(incoming)
            with contextlib.suppress(OSError):
                publish(incoming, self.folder / code)  # fails if another worker was faster; its folder is equal
            self._delete_unused()
        except (OSError, tarfile.TarError) as error:
            raise ClusterError(f"cannot unpack the uploaded code into {self.folder}: {error}") from error
        finally:
            _remove(incoming)
        return self.use(code)

    def _delete_unused(self) -> None:
        """Delete folders that were not used for a long time, also those of a worker that was killed."""
        with tempfile.TemporaryFile(dir=self.folder) as new:
            now = os.fstat(new.fileno()).st_mtime
        for folder in self.folder.iterdir():
            if now - folder.stat().st_mtime > UNUSED_S:
                _remove(folder)


def _make_read_only(folder: Path) -> None:
    """Ranks must not change the code of other runs."""
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)


def _remove(folder: Path) -> None:
    if folder.exists():
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)
