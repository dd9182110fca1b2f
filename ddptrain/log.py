"""ddptrain's own log: what the program decides and why, on the standard logger `ddptrain`.

Each module that decides something has a `Log`; a message is a constant text, what varies goes into fields:

    _log = Log(__name__)
    _log.info("rank ordered", rank=3, worker="tcp://10.0.0.5:40123")

    2026-11-22T14:00:01.123Z INFO driver run=toy-1 attempt=1 rank=3 rank ordered worker=tcp://10.0.0.5:40123

The word behind the level is the part of ddptrain that speaks: driver, scheduler, worker, rank-server, clusters, ...
Fields and messages are redacted and sanitized before any handler sees them. The logger has a NullHandler: a program
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from ddptrain import ci
from ddptrain.errors import UsageError
from ddptrain.redact import hide_credentials, hide_known, hide_secrets
from ddptrain.sanitize import sanitized
from ddptrain.secret_rules import is_secret_name

VARIABLE = "DDPTRAIN_LOG"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_IDENTITY = ("run", "attempt", "rank")  # the fields that stand before the message, in this order
_MAX_CHARS = 2_000  # of a message or a value
_MAX_FIELDS = 20
_SHORT = 200  # characters of a text that is worth remembering
_PLAIN = re.compile(r"[^\s\"'=]+")

_logger = logging.getLogger("ddptrain")
_logger.addHandler(logging.NullHandler())


class Log:
    """A logger whose records carry fields; None leaves a field out. Costs next to nothing if nobody listens."""

    def __init__(self, name: str) -> None:
        """`name` is that of the module, as in logging.getLogger."""
        self._logger = logging.getLogger(name)

    def debug(self, message: str, /, **fields: object) -> None:
        """Log details that help to follow a decision."""
        self._write(logging.DEBUG, message, fields)

    def info(self, message: str, /, **fields: object) -> None:
        """Log a decision; it stands in logs/driver.log of every run."""
        self._write(logging.INFO, message, fields)

    def warning(self, message: str, /, **fields: object) -> None:
        """Log something that should not have happened."""
        self._write(logging.WARNING, message, fields)

    def _write(self, level: int, message: str, fields: Mapping[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, _clean(message), extra={"fields": _clean_fields(fields)}, stacklevel=3)


# --- what all records of this process have in common ---

_context: dict[str, object] = {}
_secrets: tuple[str, ...] = ()
_own = threading.local()  # `fields`: those of a thread that has a context of its own


@contextmanager
def own_context() -> Iterator[None]:
    """Until the block ends, set_context() of this thread concerns its own records alone: one of several runs."""
    _own.fields = {}
    try:
        yield
    finally:
        del _own.fields


def set_context(*, secrets: Iterable[str] | None = None, **fields: object) -> None:
    """Add fields such as run and attempt to all later records of this process; None removes a field.

    `secrets` are texts that no record may contain. In a thread with own_context() only its own records get the fields,
    and the secrets stay as they are.
    """
    global _context, _secrets  # noqa: PLW0603  # replaced as a whole: other threads read them meanwhile
    if (own := getattr(_own, "fields", None)) is not None:
        own.update(fields)
        return
    _context = {name: value for name, value in {**_context, **fields}.items() if value is not None}
    if secrets is not None:
        _secrets = tuple(secrets)


def _clean_fields(fields: Mapping[str, object]) -> dict[str, object]:
    own = getattr(_own, "fields", {})
    kept = {name: value for name, value in {**_context, **own, **fields}.items() if value is not None}
    if "value" in kept:  # it is secret if the field `name` says so
        kept = hide_secrets(kept)
    return {name: _clean_value(name, value) for name, value in kept.items()}


def _clean_value(name: str, value: object) -> object:
    if is_secret_name(name) or not isinstance(value, str | int | float):
        value = hide_secrets({name: value})[name]
    if isinstance(value, int | float):
        return value
    return _clean(value if isinstance(value, str) else _text(value))  # without the secrets inside texts, too


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value, default=str)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _clean(text: str) -> str:
    """The text on one line, without secrets and control characters, at most 2,000 characters."""
    return _cleaned(text, _secrets) if len(text) < _SHORT else _cleaned.__wrapped__(text, _secrets)


@functools.lru_cache(1024)  # messages, hosts and workers recur: a run with many ranks has thousands of records
def _cleaned(text: str, secrets: tuple[str, ...]) -> str:
    text = hide_credentials(hide_known(text, secrets))
    if len(text) > _MAX_CHARS:
        text = f"{text[:_MAX_CHARS]}... ({len(text)} characters)"
    return sanitized(text.replace("\n", "\\n").replace("\t", "\\t"))


# --- how a record looks ---


class LineFormatter(logging.Formatter):
    """One line a record; a traceback, if there is one, follows in indented lines."""

    def format(self, record: logging.LogRecord) -> str:
        """The line without its newline."""
        fields: Mapping[str, object] = getattr(record, "fields", {})
        time = datetime.fromtimestamp(record.created, UTC)
        words = [f"{time:%Y-%m-%dT%H:%M:%S}.{time.microsecond // 1000:03}Z", record.levelname, _part(record.name)]
        words += [f"{name}={_quoted(fields[name])}" for name in _IDENTITY if name in fields]
        words.append(record.getMessage())
        words += [f"{name}={_quoted(value)}" for name, value in fields.items() if name not in _IDENTITY]
        text = " ".join(words)
        if record.exc_info:
            trace = hide_credentials(hide_known(self.formatException(record.exc_info), _secrets))
            text += "".join(f"\n    {sanitized(line)}" for line in trace.splitlines())
        return text


def _part(name: str) -> str:
    """The part of ddptrain that a logger's name stands for: the room, or the process where a room has two."""
    words = name.split(".")
    if words[1:3] == ["clusters", "scheduler"]:
        return "scheduler"
    if words[1:3] == ["rank", "server"]:
        return "rank-server"
    return words[1] if len(words) > 1 else words[0]


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


# --- where records go ---


class _StderrHandler(logging.Handler):
    """Writes to stderr as it is now, or to what `divert` was given: a live display prints lines above its bars."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LineFormatter())
        self.write: Callable[[str], object] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = ci.guard(os.environ)(self.format(record))
            if self.write is not None:
                self.write(line)
            elif sys.stderr is not None:
                encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
                print(line.encode(encoding, "replace").decode(encoding), file=sys.stderr, flush=True)
        except Exception:  # a log that can't be written must not end what it reports on
            pass


_stderr = _StderrHandler()
_attach_lock = threading.Lock()


def attach(handler: logging.Handler, level: int) -> None:
    """Give a handler the records from `level` on."""
    handler.setLevel(level)
    with _attach_lock:
        _logger.addHandler(handler)
        _set_lowest_level()


def detach(handler: logging.Handler) -> None:
    """Take a handler off the logger."""
    with _attach_lock:
        _logger.removeHandler(handler)
        _set_lowest_level()


def _set_lowest_level() -> None:
    levels = [handler.level for handler in _logger.handlers if not isinstance(handler, logging.NullHandler)]
    _logger.setLevel(min(levels, default=logging.NOTSET))


def to_stderr(environ: Mapping[str, str] | None = None) -> None:
    """Write the log to stderr if DDPTRAIN_LOG is debug, info or warning. Raises UsageError for another value."""
    value = (os.environ if environ is None else environ).get(VARIABLE, "").strip().lower()
    if not value:
        return
    if value not in LEVELS:
        raise UsageError(f"{VARIABLE} is {value!r}; choose one of {', '.join(LEVELS)}")
    attach(_stderr, LEVELS[value])


def divert(write: Callable[[str], object] | None) -> None:
    """Hand the lines for stderr to `write` from now on, which must not block; None: to stderr again."""
    _stderr.write = write


# --- records of workers, which reach the driver as messages ---


def topic(run_id: str) -> str:
    """The Dask topic over which workers send a run's log records to its driver."""
    return f"ddptrain/{run_id}/log"


def packed(name: str, message: str, fields: Mapping[str, object]) -> dict[str, Any]:
    """A record of level info as plain data, for `unpack` in the driver."""
    return {"name": name, "message": _clean(message), "fields": _clean_fields(fields)}


def unpack(record: object) -> None:
    """Log what `packed` has made in another process; anything else is ignored, as the network is not trusted."""
    match record:
        case {"name": str(name), "message": str(message), "fields": {**fields}} if len(fields) <= _MAX_FIELDS:
            if name.startswith("ddptrain.") and name.isascii():
                Log(name).info(message, **{_clean(str(key))[:50]: value for key, value in fields.items()})
        case _:
            pass


class RunLog:
    """The log of a run in a worker: each record is logged in this process and sent to the run's driver."""

    def __init__(self, name: str, send: Callable[[str, dict[str, Any]], object], run: str, **fields: object) -> None:
        """`send` publishes a message under a topic: the worker's log_event; `fields` are those of every record."""
        self._log, self._name, self._send = Log(name), name, send
        self._topic, self._fields = topic(run), {"run": run, **fields}

    def info(self, message: str, /, **fields: object) -> None:
        """Log a decision."""
        everything = {**self._fields, **fields}
        self._log.info(message, **everything)
        self._send(self._topic, packed(self._name, message, everything))
