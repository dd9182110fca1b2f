"""Code that has come along, unpacked once a host: a folder for each content, read-only, kept for the next run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import stat
import tarfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import platformdirs

from ddptrain.errors import ClusterError
from ddptrain.protocol.code_digest import content_hash, looks

LIMIT_BYTES = 2_000_000_000
_INCOMING = ".incoming-"
_RECORD = ".ddptrain-code.json"  # how the files looked when their hash had been proved
_ABANDONED_S = 24 * 3600.0
_held: dict[str, dict[str, int]] = {}  # run -> what it uses -> the lock on it
_lock = threading.Lock()


class CodeCache:
    """Folders named by the hash of what they hold; what a run uses is locked, and never pruned."""

    def __init__(self, folder: Path | None = None, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = folder or platformdirs.user_cache_path("ddptrain") / "code"
        self.limit_bytes = limit_bytes

    def use(self, run_id: str, code: str) -> str:
        """The folder with this content, from now on held for the run; "" where it is not here, or no longer that."""
        home = self.folder / code
        if not _is_intact(home):
            if home.exists():  # somebody has written there; root may
                _let_go(run_id, code)
                self._drop(home)
            return ""
        with contextlib.suppress(OSError):
            self._hold(run_id, code)
            os.utime(home)  # for who is pruned first
        return str(home) if home.is_dir() else ""  # it may have been pruned before it was held

    def unpack(self, run_id: str, code: str, archive: Path, names: Iterable[str]) -> str:
        """Unpack an archive and prove that it is what its hash says; return the folder, held for the run.

        Raises: ClusterError where it is something else, or can't be written.
        """
        incoming = self.folder / f"{_INCOMING}{secrets.token_hex(8)}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            incoming.mkdir(mode=0o700)
            with tarfile.open(archive, mode="r:gz") as file:
                file.extractall(incoming, filter="data")
            if content_hash(incoming, names := list(names)) != code:
                raise ClusterError(f"the code was changed while it was packed, or is damaged: its hash is not {code}")
            record = {"looks": looks(incoming, names), "names": names}
            (incoming / _RECORD).write_text(json.dumps(record), encoding="utf-8")
            _protect(incoming)
            self._hold(run_id, code)  # before it can be pruned
            with contextlib.suppress(OSError):
                os.rename(incoming, self.folder / code)  # where another worker was faster, its folder is as good
            self._prune()
        except (OSError, tarfile.TarError) as error:
            raise ClusterError(f"cannot unpack the code that came along into {self.folder}: {error}") from error
        finally:
            _remove(incoming)
        if not (found := self.use(run_id, code)):
            raise ClusterError(f"{self.folder / code} is in the way of the code that came along: delete it")
        return found

    def _hold(self, run_id: str, code: str) -> None:
        with _lock:
            if code in _held.get(run_id, {}):
                return
        fd = os.open(self.folder / f"{code}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        with _lock:
            _held.setdefault(run_id, {})[code] = fd

    def _prune(self) -> None:
        """Delete what was not used for longest, and is not in use, until the rest is within the limit."""
        kept = sorted((path for path in self.folder.iterdir() if path.is_dir()), key=lambda path: -path.stat().st_mtime)
        total = 0
        for left in self.folder.glob(f"{_INCOMING}*"):  # by a worker that was killed
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                _remove(left)
        kept = [home for home in kept if not home.name.startswith(_INCOMING)]
        for number, home in enumerate(kept):
            total += sum(path.lstat().st_size for path in home.rglob("*"))
            if total > self.limit_bytes and number > 0:
                self._drop(home)

    def _drop(self, home: Path) -> None:
        lock = home.with_name(f"{home.name}.lock")
        with contextlib.suppress(OSError):
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                gone = home.with_name(f"{_INCOMING}{secrets.token_hex(8)}")
                os.rename(home, gone)
                _remove(gone)
            finally:
                os.close(fd)


def release(run_id: str) -> None:
    """The run is over: what it used may be pruned."""
    with _lock:
        held = _held.pop(run_id, {})
    for fd in held.values():
        os.close(fd)


def _let_go(run_id: str, code: str) -> None:
    with _lock:
        fd = _held.get(run_id, {}).pop(code, None)
    if fd is not None:
        os.close(fd)


def _is_intact(home: Path) -> bool:
    """Whether the files look as they did when their hash had been proved."""
    try:
        record = json.loads((home / _RECORD).read_text(encoding="utf-8"))
        return bool(record["looks"] == looks(home, record["names"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _protect(folder: Path) -> None:
    """Nobody writes there by mistake: the next run would see it."""
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)


def _remove(folder: Path) -> None:
    if folder.exists():
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)
