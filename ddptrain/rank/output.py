"""What a rank sends: events, files for the run directory, and the numbers in them."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from ddptrain.config.wording import shorten
from ddptrain.file_ops import hash_file
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec

_MIN_TIMED_S = 0.01
PROGRESS_INTERVAL_S = 0.1  # ten events per second are enough for a display


class Emitter:
    """Appends events to `fd`, from any thread. Events of a forked child (a DataLoader worker) are dropped."""

    def __init__(self, fd: int, path: str = "") -> None:
        """If `path` is given, it is opened again when the user's code has closed `fd`, as daemons close all."""
        self._fd = fd
        self._path, self._file = path, os.fstat(fd) if path else None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_line_incomplete = False
        self._progress_at = -PROGRESS_INTERVAL_S
        self._done: float | None = None

    def emit(self, event: events.Event) -> None:
        """Append one event. Raises OSError if the disk is full, EventFormatError if the event is too long."""
        if os.getpid() != self._pid:
            return
        data = events.encode(event)
        with self._lock:
            self._reopen_if_closed()
            data = b"\n" + data if self._is_line_incomplete else data  # a full disk has cut off the last line
            while data:
                data = data[os.write(self._fd, data) :]
                self._is_line_incomplete = bool(data)

    def _reopen_if_closed(self) -> None:
        if self._file is None:
            return
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._fd), self._file):
                return
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)  # it may belong to another file now

    def note(self, text: str, level: str = "info") -> None:
        """Append a line for the user; `level` is "info" or "warning". A full disk is ignored."""
        with suppress(OSError):
            self.emit(events.Note(time.time_ns(), text, level))

    def timed(self, activity: str, seconds: float) -> None:
        """Append the duration of an activity, unless it is below 0.01 s: ctx.checkpoint may be called in each step."""
        if seconds >= _MIN_TIMED_S:
            with suppress(OSError):
                self.emit(events.Timed(time.time_ns(), activity, seconds))

    def progress(self, done: float, total: float | None, unit: str) -> None:
        """Append a Progress event, at most ten per second. The last one (done == total) is always appended, once."""
        now = time.monotonic()
        is_last = done == total != self._done
        if now - self._progress_at < PROGRESS_INTERVAL_S and not is_last:
            return
        self._progress_at, self._done = now, done
        self.emit(events.Progress(time.time_ns(), done=done, total=total, unit=unit))


def stays_below(path: str) -> bool:
    """Return whether a relative path stays below its folder. The driver checks the path again, more strictly."""
    parts = PurePosixPath(path).parts
    return bool(parts) and ".." not in parts and not path.startswith("/")


class ArtifactFiles:
    """Stages files of this rank and announces them to the driver."""

    def __init__(self, spec: RankSpec, emitter: Emitter) -> None:
        self._spec = spec
        self._emitter = emitter
        self._counter = itertools.count()

    def new_staging(self, kind: str) -> Path:
        """Return a new path in the staging folder; its name begins with `kind`."""
        return Path(self._spec.host.staging) / f"{kind}-{next(self._counter)}"

    def stage(self, path: str, data: bytes | str | Path) -> Path:
        """Write the content of artifacts/`path` into a new staging file, or copy it there; return the file.

        Raises ValueError if the path leads out of artifacts/, OSError if the file can't be read or written.
        """
        if not stays_below(path):
            raise ValueError(f"ctx.save_file takes a path below artifacts/, such as 'samples/a.txt', not {path!r}")
        staged = self.new_staging("file")
        if isinstance(data, Path):
            shutil.copyfile(data, staged)
        else:
            staged.write_bytes(data.encode() if isinstance(data, str) else data)
        return staged

    def save(self, path: str, data: bytes | str | Path) -> None:
        """Stage a file for artifacts/`path` and announce it. Raises as `stage`."""
        self.announce(path, self.stage(path, data))

    def announce(self, path: str, staged: Path, area: str = "artifacts") -> None:
        """Announce a complete staged file to the driver, for `path` below `area`. Raises OSError."""
        size, digest = hash_file(staged)
        self._emitter.emit(events.FileSaved(time.time_ns(), path, staged.name, size, digest, area))


def number(name: object, value: Any) -> float:
    """Return a number, or the only element of a tensor or array, as a number; an integer above 64 bits as a float.

    Raises TypeError, which contains `name`.
    """
    if type(value) is float:  # the fast path of nearly all calls
        return value
    item = value.item() if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1 else value
    if isinstance(item, bool) or not isinstance(item, int | float):
        text = shorten(repr(value), 300)
        raise TypeError(f"ctx.log, ctx.progress and metrics take numbers: {name!r} is {text} ({type(value).__name__})")
    if isinstance(item, float) or -(2**63) <= item < 2**63:
        return item
    try:
        return float(item)
    except OverflowError:  # above 1e308
        return math.inf if item > 0 else -math.inf


def numbers(values: Any) -> dict[str, float]:
    """Return all values of a mapping as Python numbers. Raises TypeError."""
    if not isinstance(values, Mapping):
        text = f"{shorten(repr(values), 300)} ({type(values).__name__})"
        raise TypeError(f"ctx.log and metrics take names with numbers, as {{'loss': 0.5}}, not {text}")
    return {str(name): number(name, value) for name, value in values.items()}


def optional(name: str, value: Any) -> float | None:
    """Return the value as a number, or None. Raises TypeError."""
    return None if value is None else number(name, value)


def whole(name: str, value: Any) -> int:
    """Return the value as a whole number of at most 64 bits. Raises TypeError."""
    converted = number(name, value)
    is_too_large = abs(converted) >= 2**63
    if converted % 1 != 0 or is_too_large:
        limit = " of at most 64 bits" if is_too_large else ""
        raise TypeError(f"{name} must be a whole number{limit}, not {shorten(repr(value), 100)}")
    return int(converted)


def optional_whole(name: str, value: Any) -> int | None:
    """Return the value as a whole number, or None. Raises TypeError."""
    return None if value is None else whole(name, value)
