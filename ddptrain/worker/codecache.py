"""Code that has come along, unpacked once a host: a folder for each content, read-only, kept for the next run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tarfile
import threading
from collections.abc import Iterable
from pathlib import Path

import platformdirs

from ddptrain.codefolder import content_hash
from ddptrain.errors import ClusterError

LIMIT_BYTES = 2_000_000_000
_INCOMING = ".incoming-"
_held: dict[str, list[int]] = {}  # run -> locks on what it uses
_lock = threading.Lock()


class CodeCache:
    """Folders named by the hash of what they hold; what a run uses is locked, and never pruned."""

    def __init__(self, folder: Path | None = None, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = folder or platformdirs.user_cache_path("ddptrain") / "code"
        self.limit_bytes = limit_bytes

    def use(self, run_id: str, code: str) -> str:
        """The folder with this content, from now on held for the run; "" where it is not here."""
        home = self.folder / code
        if not home.is_dir():
            return ""
        with contextlib.suppress(OSError):
            self._hold(run_id, code)
            os.utime(home)  # for who is pruned first
        return str(home)

    def unpack(self, run_id: str, code: str, archive: Path, names: Iterable[str]) -> str:
        """Unpack an archive and prove that it is what its hash says; return the folder, held for the run.

        Raises: ClusterError where it is something else, or can't be written.
        """
        incoming = self.folder / f"{_INCOMING}{secrets.token_hex(8)}"
        try:
            incoming.mkdir(parents=True, mode=0o700)
            with tarfile.open(archive, mode="r:gz") as file:
                file.extractall(incoming, filter="data")
            if content_hash(incoming, names) != code:
                raise ClusterError(f"the code that came along is damaged: its hash is not {code}")
            _protect(incoming)
            with contextlib.suppress(FileExistsError, OSError):
                os.rename(incoming, self.folder / code)  # where another worker was faster, its folder is as good
        except (OSError, tarfile.TarError) as error:
            raise ClusterError(f"cannot unpack the code that came along into {self.folder}: {error}") from error
        finally:
            _remove(incoming)
        self._prune()
        return self.use(run_id, code)

    def _hold(self, run_id: str, code: str) -> None:
        fd = os.open(self.folder / f"{code}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        with _lock:
            _held.setdefault(run_id, []).append(fd)

    def _prune(self) -> None:
        """Delete what was not used for longest, and is not in use, until the rest is within the limit."""
        kept = sorted((path for path in self.folder.iterdir() if path.is_dir()), key=lambda path: -path.stat().st_mtime)
        total = 0
        for number, home in enumerate(kept):
            total += sum(path.lstat().st_size for path in home.rglob("*"))
            if total > self.limit_bytes and number > 0 and not home.name.startswith(_INCOMING):
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
        held = _held.pop(run_id, [])
    for fd in held:
        os.close(fd)


def _protect(folder: Path) -> None:
    """Nobody writes there by mistake: the next run would see it."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)


def _remove(folder: Path) -> None:
    if folder.exists():
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)
