"""The heartbeat of a driver: it touches a file every 2 seconds, so that other hosts see that it is alive.

A lock is more reliable, but some network file systems do not show a lock to other hosts.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path

from ddptrain import file_ops
from ddptrain.errors import DdptrainError, RunLocked
from ddptrain.results import secure_files
from ddptrain.results.errors import ResultsError, results_errors

BEAT_EVERY_S = 2.0
SILENT_AFTER_S = 30.0


class HeartbeatState(Enum):
    """The state of a run's heartbeat file."""

    BEATING = "beating"
    SILENT = "silent"
    NONE = "none"  # there is no file: an older version wrote the run, or the directory is a copy


def look(path: Path) -> HeartbeatState:
    """Return the state of the heartbeat; its age is measured by the clock of its file system."""
    changed_at = _changed_at(path)
    if changed_at is None:
        return HeartbeatState.NONE
    is_silent = file_ops.time_in(path.parent) - changed_at > SILENT_AFTER_S
    return HeartbeatState.SILENT if is_silent else HeartbeatState.BEATING


def _changed_at(path: Path) -> float | None:
    """Return when the file changed last, in seconds since 1970; None if there is no file.

    The file is opened because NFS then asks the server again.
    """
    try:
        descriptor = file_ops.open_regular(path)
    except OSError:
        return None
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


class Heartbeat:
    """This driver's heartbeat."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        host = socket.gethostname()
        self._text = json.dumps({"pid": os.getpid(), "host": host, "token": secrets.token_hex(8)}).encode()
        secure_files.write_file(path, self._text)

    def keep(self, lost: Callable[[DdptrainError], None]) -> None:
        """Touch the file in a thread until close(). `lost` is called once if another driver has replaced the file."""
        self._thread = threading.Thread(target=self._run, args=(lost,), name="ddptrain-heartbeat", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Touch the file. Raises RunLocked if another driver has the run now; ResultsError."""
        with results_errors(self._path):
            try:
                descriptor = file_ops.open_regular(self._path)
            except FileNotFoundError:
                secure_files.write_file(self._path, self._text)
                return
            try:
                content = os.read(descriptor, 4 * len(self._text))
                if content != self._text:
                    raise RunLocked(f"run {self._path.parent.name} has been taken over by {_owner(content)}")
                os.utime(descriptor)
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """Stop, and delete the file if it still belongs to this driver; closing twice is harmless."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with suppress(OSError, DdptrainError):
            self.beat()
            self._path.unlink()

    def _run(self, lost: Callable[[DdptrainError], None]) -> None:
        while not self._stopped.wait(BEAT_EVERY_S):
            try:
                self.beat()
            except RunLocked as error:
                lost(error)
                return
            except ResultsError:
                continue  # the file system may answer again


def _owner(content: bytes) -> str:
    """Return the process that has written this content of a heartbeat file, for messages."""
    try:
        raw = json.loads(content)
        return f"process {int(raw['pid'])} on {raw['host']}"
    except (ValueError, LookupError, TypeError):
        return "another process"
