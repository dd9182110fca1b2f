"""The code cache of a host: one read-only folder for each version of a project that a driver has uploaded."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import stat
import tarfile
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

import platformdirs

from ddptrain.errors import ClusterError
from ddptrain.file_ops import make_private, publish, try_lock, wait_for_lock, why_not_private
from ddptrain.protocol.code_digest import change_digest, content_hash

LIMIT_BYTES = 2_000_000_000
_INCOMING = ".incoming-"
_RECORD = ".ddptrain-code.json"  # sizes and times of the files when their hash was verified
_ABANDONED_S = 24 * 3600.0
_held: dict[str, dict[str, int]] = {}  # run id -> hash of the code that it uses -> descriptor of the lock
_lock = threading.Lock()


class CodeCache:
    """Folders named by the hash of their content. Code that a run uses is locked and never deleted."""

    def __init__(self, folder: Path | None = None, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = folder or platformdirs.user_cache_path("ddptrain") / "code"
        self.limit_bytes = limit_bytes

    def use(self, run_id: str, code: str) -> str:
        """Return the folder with the content hash `code`, locked for the run; "" if it is missing or was modified.

        Raises ClusterError if the cache is not private.
        """
        self._require_private()
        folder = self.folder / code
        if not _is_intact(folder):
            if folder.exists():  # modified although it is read-only
                _unlock(run_id, code)
                self._delete(folder)
            return ""
        with contextlib.suppress(OSError):
            self._hold(run_id, code)
            os.utime(folder)  # the least recently used folders are deleted first
        return str(folder) if folder.is_dir() else ""  # it may have been deleted before it was locked

    def unpack(self, run_id: str, code: str, archive: Path, names: Iterable[str]) -> str:
        """Unpack an archive; return the folder, locked for the run.

        Raises ClusterError, also if the hash is not `code`.
        """
        incoming = self.folder / f"{_INCOMING}{secrets.token_hex(8)}"
        try:
            make_private(self.folder)
            self._require_private()
            incoming.mkdir(mode=0o700)
            with tarfile.open(archive, mode="r:gz") as file:
                file.extractall(incoming, filter="data")
            if content_hash(incoming, names := list(names)) != code:
                raise ClusterError(f"the code was changed while it was packed, or is damaged: its hash is not {code}")
            record = {"looks": change_digest(incoming, names), "names": names}
            (incoming / _RECORD).write_text(json.dumps(record), encoding="utf-8")
            _make_read_only(incoming)
            self._hold(run_id, code)  # before another process can delete it
            with contextlib.suppress(OSError):
                publish(incoming, self.folder / code)  # fails if another worker was faster; its folder is equal
            self._prune()
        except (OSError, tarfile.TarError) as error:
            raise ClusterError(f"cannot unpack the uploaded code into {self.folder}: {error}") from error
        finally:
            _remove(incoming)
        if not (folder := self.use(run_id, code)):
            raise ClusterError(f"{self.folder / code} is where the uploaded code must be written: delete it")
        return folder

    def _require_private(self) -> None:
        """Raise ClusterError if another user can write to the cache: their code would run."""
        with contextlib.suppress(FileNotFoundError):
            if problem := why_not_private(self.folder, self.folder.lstat()):
                raise ClusterError(problem)

    def _hold(self, run_id: str, code: str) -> None:
        with _lock:
            if code in _held.get(run_id, {}):
                return
        fd = os.open(self.folder / f"{code}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        wait_for_lock(fd, shared=True)
        with _lock:
            _held.setdefault(run_id, {})[code] = fd

    def _prune(self) -> None:
        """Delete unused code, least recently used first, until the cache is within its limit."""
        folders = sorted((path for path in self.folder.iterdir() if path.is_dir()), key=lambda p: -p.stat().st_mtime)
        total = 0
        with tempfile.TemporaryFile(dir=self.folder) as new:
            now = os.fstat(new.fileno()).st_mtime
        for leftover in self.folder.glob(f"{_INCOMING}*"):  # of a worker that was killed
            if now - leftover.stat().st_mtime > _ABANDONED_S:
                _remove(leftover)
        for number, folder in enumerate(path for path in folders if not path.name.startswith(_INCOMING)):
            total += sum(path.lstat().st_size for path in folder.rglob("*"))
            if total > self.limit_bytes and number > 0:
                self._delete(folder)

    def _delete(self, folder: Path) -> None:
        """Delete a folder of code, unless a run has locked it."""
        lock = folder.with_name(f"{folder.name}.lock")
        with contextlib.suppress(OSError):
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if try_lock(fd):
                    renamed = folder.with_name(f"{_INCOMING}{secrets.token_hex(8)}")
                    publish(folder, renamed)
                    _remove(renamed)
            finally:
                os.close(fd)


def release(run_id: str) -> None:
    """Unlock all code that a run used, after the run."""
    with _lock:
        held = _held.pop(run_id, {})
    for fd in held.values():
        os.close(fd)


def _unlock(run_id: str, code: str) -> None:
    with _lock:
        fd = _held.get(run_id, {}).pop(code, None)
    if fd is not None:
        os.close(fd)


def _is_intact(folder: Path) -> bool:
    """Return whether the files have the sizes and times that they had when their hash was verified."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        return bool(record["looks"] == change_digest(folder, record["names"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _make_read_only(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)


def _remove(folder: Path) -> None:
    if folder.exists():
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)
