"""ddptrain's own log: what the program decides and why, on the standard logger `ddptrain`.

Each module that logs has a `Log`. A message is a constant text; values go into fields:

    _log = Log(__name__)
    _log.info("rank ordered", rank=3, worker="tcp://10.0.0.5:40123")

    2026-11-22T14:00:01.123Z INFO driver run=toy-1 attempt=1 rank=3 rank ordered worker=tcp://10.0.0.5:40123

The word after the level is the part of ddptrain that logged the record: driver, scheduler, worker, rank-server, ...
A filter redacts and sanitizes fields and messages before any handler sees them. The logger has a NullHandler: a program
that imports ddptrain sees these records only if it configures logging itself.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

from ddptrain.errors import UsageError
from ddptrain.redact import hide_credentials, hide_known, hide_secrets, is_secret_name
from ddptrain.sanitize import sanitized

VARIABLE = "DDPTRAIN_LOG"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_IDENTITY = ("run", "attempt", "rank")  # the fields that stand before the message, in this order
_MAX_CHARS = 2_000  # of a message or a value
_MAX_CACHED_CHARS = 200  # longer texts are not kept in the cache of _cleaned()
_PLAIN = re.compile(r"[^\s\"'=]+")

_logger = logging.getLogger("ddptrain")
_logger.addHandler(logging.NullHandler())


class Log:
    """A standard logger whose records have fields: info(message, **fields). One with the value None is left out."""

    def __init__(self, name: str) -> None:
        """`name` is the module's name, as in logging.getLogger."""
        self._logger = logging.getLogger(name)
        self._logger.addFilter(_redacts)

    def debug(self, message: str, /, **fields: object) -> None:
        """Log details that help to follow a decision."""
        self._write(logging.DEBUG, message, fields)

    def info(self, message: str, /, **fields: object) -> None:
        """Log a decision; logs/ddptrain.log of every run contains it."""
        self._write(logging.INFO, message, fields)

    def warning(self, message: str, /, **fields: object) -> None:
        """Log something that should not have happened."""
        self._write(logging.WARNING, message, fields)

    def _write(self, level: int, message: str, fields: Mapping[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, message, extra={"fields": fields}, stacklevel=3)


# --- the filter: fields of all records of this process, and what no record may contain ---

_context: dict[str, object] = {}
_secrets: tuple[str, ...] = ()
_thread_context = threading.local()  # `fields`: the context of a thread in own_context()


@contextmanager
def own_context() -> Iterator[None]:
    """Make set_context() apply only to the records of this thread until the block ends: each thread has another run."""
    _thread_context.fields = {}
    try:
        yield
    finally:
        del _thread_context.fields


def set_context(*, secrets: Iterable[str] | None = None, **fields: object) -> None:
    """Add fields such as run and attempt to all later records of this process; None removes a field.

    `secrets` are texts that no record may contain. In a thread with own_context() only the records of this thread get
    the fields, and `secrets` is ignored.
    """
    global _secrets  # noqa: PLW0603  # replaced as a whole: other threads read them meanwhile
    if (thread_fields := getattr(_thread_context, "fields", None)) is not None:
        thread_fields.update(fields)
        return
    _context.update(fields)
    if secrets is not None:
        _secrets = tuple(secrets)


class RedactingFilter(logging.Filter):
    """Adds the context to a record, and takes secrets, control characters and long texts out of it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record; always return True."""
        fields = {**_context, **getattr(_thread_context, "fields", {}), **getattr(record, "fields", {})}
        record.msg, record.__dict__["fields"] = _clean(record.msg), _clean_fields(fields)
        return True


_redacts = RedactingFilter()


def _clean_fields(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: _clean_value(name, value) for name, value in fields.items() if value is not None}


def _clean_value(name: str, value: object) -> object:
    if is_secret_name(name) or not isinstance(value, str | int | float):
        value = hide_secrets({name: value})[name]
    if isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        value = json.dumps(value, default=str)
    return _clean(", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))


def _clean(text: str) -> str:
    """Return the text on one line, without secrets and control characters, at most 2,000 characters."""
    return _cleaned(text, _secrets) if len(text) < _MAX_CACHED_CHARS else _cleaned.__wrapped__(text, _secrets)


@functools.lru_cache(1024)  # a run with many ranks has thousands of records with the same messages, hosts and workers
def _cleaned(text: str, secrets: tuple[str, ...]) -> str:
    text = hide_credentials(hide_known(text, secrets))
    if len(text) > _MAX_CHARS:
        text = f"{text[:_MAX_CHARS]}... ({len(text)} characters)"
    return sanitized(text.replace("\n", "\\n").replace("\t", "\\t"))


# --- the formatter ---


class LineFormatter(logging.Formatter):
    """Formats a record as one line."""

    converter = time.gmtime  # type: ignore[assignment]  # as in the documentation of logging
    default_time_format, default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text, without a newline at the end."""
        fields: Mapping[str, object] = getattr(record, "fields", {})
        part = record.name.removeprefix("ddptrain.").partition(".")[0]
        before = {name: fields[name] for name in _IDENTITY if name in fields}
        after = {name: value for name, value in fields.items() if name not in _IDENTITY}
        words = [self.formatTime(record), record.levelname, part, *_words(before), record.getMessage(), *_words(after)]
        return " ".join(words)


def _words(fields: Mapping[str, object]) -> Iterator[str]:
    for name, value in fields.items():
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        yield f"{name}={text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)}"


def as_text(message: str, /, **fields: object) -> str:
    """Return a message with its fields as the text of a record that another process logs."""
    return " ".join([message, *_words(_clean_fields(fields))])


# --- handlers ---


class _StderrHandler(logging.Handler):
    """Writes to the current sys.stderr, or to the function given to `divert`: a live display prints above its bars."""

    write: Callable[[str], object] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # an error of the log does not end the program
            if self.write is not None:
                self.write(self.format(record))
            elif sys.stderr is not None:
                print(self.format(record), file=sys.stderr, flush=True)


_stderr = _StderrHandler()
_attach_lock = threading.Lock()


def attach(handler: logging.Handler, level: int) -> None:
    """Add a handler for records of `level` and higher levels."""
    handler.setLevel(level)
    handler.setFormatter(LineFormatter())
    with _attach_lock:
        _logger.addHandler(handler)
        _set_lowest_level()


def detach(handler: logging.Handler) -> None:
    """Remove a handler."""
    with _attach_lock:
        _logger.removeHandler(handler)
        _set_lowest_level()


def _set_lowest_level() -> None:
    levels = [handler.level for handler in _logger.handlers if not isinstance(handler, logging.NullHandler)]
    _logger.setLevel(min(levels, default=logging.NOTSET))


def to_stderr(default: str = "") -> None:
    """Write the log to stderr if DDPTRAIN_LOG, or `default` without it, is debug, info or warning.

    Raises UsageError for another value.
    """
    if not (value := os.environ.get(VARIABLE, "").strip().lower() or default):
        return
    if value not in LEVELS:
        raise UsageError(f"{VARIABLE} is {value!r}; choose one of {', '.join(LEVELS)}")
    attach(_stderr, LEVELS[value])


def divert(write: Callable[[str], object] | None) -> None:
    """Pass the lines for stderr to `write`, which must not block; None writes them to stderr again."""
    _stderr.write = write
