"""Writes ddptrain's own log of a run into logs/ddptrain.log of the run directory: the file for bug reports."""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddptrain import file_ops, log
from ddptrain.results.errors import ResultsError
from ddptrain.results.secure_files import open_to_append
from ddptrain.version import __version__

MAX_BYTES = 8 << 20  # a larger file is renamed to ddptrain.log.1, which replaces an older ddptrain.log.1

_log = log.Log("ddptrain.driver")


@contextmanager
def driver_log(path: Path, run_id: str, secrets: Iterable[str], *, only_own: bool = False) -> Iterator[None]:
    """Append all records from level info on to the file until the block ends; `secrets` are left out.

    only_own: append only records of this run, because other runs of this process have logs of their own.

    Raises ResultsError if the file can't be opened.
    """
    handler = LogFile(path)
    if only_own:
        handler.addFilter(lambda record: getattr(record, "fields", {}).get("run") == run_id)
    log.set_context(run=run_id, secrets=secrets)
    log.attach(handler, logging.INFO)
    try:
        versions = {"version": __version__, "python": platform.python_version(), "system": platform.platform()}
        command = sys.argv[1] if len(sys.argv) > 1 else ""
        _log.info("driver started", **versions, host=platform.node(), pid=os.getpid(), command=command)
        yield
    except BaseException as error:
        _log.info("driver ends", error=f"{type(error).__name__}: {error}")
        raise
    finally:
        log.detach(handler)
        handler.close()
        log.set_context(run=None, attempt=None, secrets=())


class LogFile(logging.Handler):
    """Appends records to a file of a run directory. Once a write has failed (a full disk), it writes nothing more."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """Open the file; a missing file is created. Raises ResultsError."""
        super().__init__()
        self._path, self._max_bytes = path, max_bytes
        self._descriptor = open_to_append(path)
        self._size = os.fstat(self._descriptor).st_size
        self._mutex = threading.Lock()
        if self._size and os.pread(self._descriptor, 1, self._size - 1) != b"\n":
            self._append(b"\n")  # a driver that was killed has left an incomplete line

    def emit(self, record: logging.LogRecord) -> None:
        """Append the record; an error ends the log, not the run."""
        with self._mutex:
            if self._descriptor < 0:
                return
            try:
                data = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
                if self._size and self._size + len(data) > self._max_bytes:
                    self._rotate()
                self._append(data)
            except (OSError, ResultsError, ValueError):
                self._close_file()

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        with self._mutex:
            self._close_file()
        super().close()

    def _append(self, data: bytes) -> None:
        file_ops.write_all(self._descriptor, data)
        self._size += len(data)

    def _rotate(self) -> None:
        self._close_file()
        file_ops.publish(self._path, self._path.with_name(f"{self._path.name}.1"))  # a link is renamed, never followed
        self._descriptor = open_to_append(self._path)
        self._size = os.fstat(self._descriptor).st_size

    def _close_file(self) -> None:
        with suppress(OSError):
            if self._descriptor >= 0:
                os.close(self._descriptor)
        self._descriptor = -1
