"""Writes ddptrain's own log of a run into logs/ddptrain.log of the run directory: the file for bug reports."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from ddptrain import log
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


class LogFile(RotatingFileHandler):
    """Appends records to a file of a run directory. Once a write has failed (a full disk), it writes nothing more."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """Open the file; a missing file is created. Raises ResultsError."""
        super().__init__(path, maxBytes=max_bytes, backupCount=1)
        if size := path.stat().st_size:
            with path.open("rb") as file:
                file.seek(size - 1)
                is_torn = file.read() != b"\n"  # a driver that was killed has left an incomplete line
            if is_torn and self.stream is not None:
                self.stream.write("\n")

    def _open(self) -> TextIOWrapper:
        descriptor = open_to_append(Path(self.baseFilename))  # a link is not followed
        return open(descriptor, "a", encoding="utf-8", errors="backslashreplace")

    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802  # logging's name
        """Return whether the file is large enough."""
        return self.stream is not None and os.fstat(self.stream.fileno()).st_size >= self.maxBytes

    def emit(self, record: logging.LogRecord) -> None:
        """Append the record."""
        if self.stream is not None:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """End the log, not the run."""
        with suppress(OSError):
            self.close()
