"""Which process works on a run: a lock for this host; for others the time of the lock file, which its owner touches.

Runs of object stores have a lease in the place of the lock file: see remote/lease.py.

Both times that are compared, that of the lock file and that of a file that is created now, are those of the file
system: the clocks of hosts do not matter.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from ddptrain import file_ops
from ddptrain.errors import DdptrainError, RunLocked
from ddptrain.host_identity import is_this_host
from ddptrain.log import Log
from ddptrain.results.errors import ResultsError, results_errors
from ddptrain.results.run_record import DriverRecord

BEAT_EVERY_S = 2.0
SILENT_AFTER_S = 30.0
_PATIENCE_S = 0.5  # a reader that tests the lock holds it for microseconds
_PAUSE_S = 0.01
_WHO = re.compile(r"process (\d+) on [\w.-]+")
_LONGEST_BYTES = 1000
_log = Log(__name__)


def holder(path: Path) -> str:
    """Return the process that took the lock last, as "process 12 on host"; "" if the file does not name it."""
    match = None
    with suppress(OSError):
        match = _WHO.match(file_ops.read_regular(path).decode(errors="replace"))
    return match[0] if match else ""


def is_held(path: Path) -> bool | None:
    """Return whether a process holds the lock, as far as this host sees; False if there is no lock file.

    None if this user can't open it, or the file system has no locks. On some network file systems a lock of another
    host looks free.
    """
    try:
        descriptor = file_ops.open_regular(path)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        return not file_ops.try_lock(descriptor, shared=True)  # shared: readers do not disturb each other
    except OSError:
        return None
    finally:
        os.close(descriptor)


def is_alive(lock_file: Path, driver: DriverRecord) -> bool:
    """Return whether the driver of a run whose run.json says `running` is alive.

    A held lock decides, and so does a free lock if the driver was started on this host. Otherwise the age of the lock
    file decides.
    """
    held = is_held(lock_file)
    if held or (held is False and is_this_host(driver.host, driver.boot_id)):
        return bool(held)
    try:
        touched = lock_file.lstat().st_mtime
    except OSError:
        return False
    return file_ops.time_in(lock_file.parent) - touched <= SILENT_AFTER_S


class Owner(ABC):
    """This process's hold on a run or on another folder; release() or the end of the process gives it up.

    A folder of this machine has a LockFile, a folder of an object store a Lease (remote/lease.py).
    """

    every_s: float  # how often it is renewed

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost: Callable[[DdptrainError], None] = lambda error: None

    @abstractmethod
    def take(self) -> Self:
        """Become the owner; return this object.

        Raises RunLocked if another process is it; ResultsError, StoreError; UsageError for a place without locks.
        """

    @abstractmethod
    def renew(self) -> None:
        """Show others that this process works. Raises RunLocked if another one has taken over; as take()."""

    def assure(self) -> None:
        """Check that no other process can be the owner now. Raises as renew()."""
        self.renew()

    @abstractmethod
    def holder(self) -> str:
        """Return who took it last, as "process 12 on host"; "" if that is not known."""

    def keep(self, lost: Callable[[DdptrainError], None] = lambda error: None) -> None:
        """Renew it in a thread until release(). `lost` is called once if another process has taken over."""
        self._lost = lost
        self._thread = threading.Thread(target=self._run, name="ddptrain-owner", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give it up; releasing twice is harmless."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        return self.take()

    def __exit__(self, *error: object) -> None:
        self.release()

    def _run(self) -> None:
        pause_s = self.every_s
        while not self._stopped.wait(pause_s):
            try:
                self.renew()
                pause_s = self.every_s
            except RunLocked as error:
                self._lose(error)
            except DdptrainError:  # the file system or the store may answer again
                pause_s = min(self.every_s, max(BEAT_EVERY_S, self.every_s / 10))

    def _lose(self, error: DdptrainError) -> None:
        if not self._stopped.is_set():
            self._stopped.set()
            self._lost(error)


class LockFile(Owner):
    """A lock of the file system, and the time of its file, which the owner touches."""

    every_s = BEAT_EVERY_S

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._descriptor = -1
        self._text = b""

    def take(self) -> Self:
        """See Owner."""
        with results_errors(self._path):  # other users can't open it to hold its lock
            self._descriptor = file_ops.open_regular(self._path, file_ops.CREATE, 0o600)
        name = self._path.parent.name
        try:
            deadline = time.monotonic() + _PATIENCE_S
            while not self._try_lock():
                if time.monotonic() >= deadline:
                    who = self.holder() or "another process"
                    raise RunLocked(f"run {name} is held by {who}; wait for it, or choose another --run-id")
                time.sleep(_PAUSE_S)
            if not file_ops.is_at(self._path, self._descriptor):
                raise RunLocked(f"run {name} was deleted by another process; run the command again")
            self._text = f"process {os.getpid()} on {socket.gethostname()}\n{os.urandom(8).hex()}\n".encode()
            with results_errors(self._path):
                os.ftruncate(self._descriptor, 0)
                file_ops.write_all(self._descriptor, self._text)
        except BaseException:
            self.release()
            raise
        _log.info("run locked", lock=self._path)
        return self

    def _try_lock(self) -> bool:
        try:
            return file_ops.try_lock(self._descriptor)
        except OSError as error:
            raise ResultsError(
                f"cannot lock {self._path}: {error.strerror}; use a folder on a file system with locks"
            ) from error

    def renew(self) -> None:
        """See Owner: not all file systems show the lock of another host."""
        with results_errors(self._path):
            content = os.pread(self._descriptor, _LONGEST_BYTES, 0)
            if content != self._text or not file_ops.is_at(self._path, self._descriptor):
                who = self.holder() or "another process"
                raise RunLocked(f"run {self._path.parent.name} has been taken over by {who}")
            os.utime(self._descriptor)

    def holder(self) -> str:
        """See Owner."""
        return holder(self._path)

    def release(self) -> None:
        """See Owner."""
        super().release()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
