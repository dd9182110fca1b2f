"""Reads every other file system that fsspec knows: pages of links over http(s), sftp, a folder in memory, ..."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote

from ddptrain.errors import UsageError
from ddptrain.optional_packages import install_command
from ddptrain.redact import hide_credentials
from ddptrain.storage.store import (
    UNKNOWN_SIZE,
    Limits,
    Listed,
    Location,
    NotFound,
    Source,
    StoreError,
    StoreForbidden,
    StoreMissing,
    StoreUnreachable,
    Transient,
)

_HTTP = ("http", "https")
_VERSION_FIELDS = ("ETag", "etag", "checksum", "md5", "mtime", "last_modified", "LastModified", "created")
_PAUSE_S = 0.5
_CHUNK_BYTES = 4 << 20
_TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}
_FINAL = (ValueError, TypeError, NotImplementedError)  # another attempt gives the same error


def open_fsspec_store(location: Location, limits: Limits) -> Source:
    """Open a location. Raises UsageError if fsspec does not know the protocol or an option, or a package is missing."""
    import fsspec  # Dask needs it, too; aiohttp comes with the extra http

    options = dict(location.options)
    if location.protocol in _HTTP:
        try:
            import aiohttp
        except ImportError:
            raise UsageError(
                f"{location.description} can't be opened: it needs aiohttp: {install_command('http')}"
            ) from None
        client = dict(options.pop("client_kwargs", {}))
        client.setdefault("timeout", aiohttp.ClientTimeout(total=limits.timeout_s, connect=limits.connect_timeout_s))
        options["client_kwargs"] = client
        options["use_listings_cache"] = False
    try:
        fs, root = fsspec.core.url_to_fs(location.url, **options)
    except (ConnectionError, TimeoutError, socket.gaierror) as error:  # some connect here, for example ftp
        raise StoreUnreachable(
            f"{location.description} can't be opened: {_said(error)}: is the address right, and the server up?"
        ) from None
    except ImportError as error:
        raise UsageError(
            f"{location.description} can't be opened: a package is not installed: {_said(error)}"
        ) from error
    except Exception as error:  # each backend has its own kinds of errors
        named = f"{location.setting} {location.description}"
        advice = f"; see {location.options_setting}" if location.options_setting else ""
        raise UsageError(f"{named} can't be opened: {type(error).__name__}: {_said(error)}{advice}") from None
    return FsspecStore(location, fs, str(root).rstrip("/"))


class FsspecStore(Source):
    """A folder of an fsspec file system."""

    def __init__(self, location: Location, fs: Any, root: str) -> None:
        self.location = location
        self.fs = fs
        self.root = root
        self._is_http = location.protocol in _HTTP

    def listing(self, folder: str = "") -> Iterator[Listed]:
        """See Source."""
        start = f"{self.root}/{folder}" if folder else self.root
        with self._errors("listed"):
            if not self._is_http and not self.fs.isdir(start):
                if folder:
                    return
                raise FileNotFoundError
            yield from self._below(f"{start}/", {f"{start}/"})

    def _below(self, folder: str, entered: set[str]) -> Iterator[Listed]:
        # fs.find() silently leaves out a folder whose listing fails.
        for about in self._entries(folder):
            path = str(about["name"])
            if about.get("type") != "directory":
                if path.startswith(f"{self.root}/"):
                    yield Listed(self._key(path), _size(about), _version(about))
            elif (inner := f"{path.rstrip('/')}/").startswith(f"{self.root}/") and inner not in entered:
                entered.add(inner)
                yield from self._below(inner, entered)

    def _entries(self, folder: str) -> Sequence[Mapping[str, Any]]:
        """List one folder; after a temporary failure, try once more."""
        try:
            entries: Sequence[Mapping[str, Any]] = self.fs.ls(folder, detail=True)
        except Exception as error:  # as above
            if not isinstance(self._error("listed", folder, error), Transient):
                raise
            time.sleep(_PAUSE_S)
            entries = self.fs.ls(folder, detail=True)
        return entries

    def get(self, key: str, *, start: int = 0, limit_bytes: int | None = None) -> bytes:
        """See Source."""
        end = None if limit_bytes is None or self._is_http else start + limit_bytes + 1
        with self._errors("read", key):
            data = bytes(self.fs.cat_file(self._path(key), start=start or None, end=end))
        return self._limited(key, data, limit_bytes)

    def chunks(self, key: str) -> Iterator[bytes]:
        """See Source."""
        with self._errors("read", key), self.fs.open(self._path(key), "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def _path(self, key: str) -> str:
        # Without a key the location is the file: an address with a query can't be taken apart.
        return f"{self.root}/{quote(key) if self._is_http else key}" if key else self.root

    def _key(self, path: str) -> str:
        key = path[len(self.root) + 1 :]
        return unquote(key) if self._is_http else key

    @contextmanager
    def _errors(self, action: str, key: str = "") -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # each backend has its own kinds of errors
            raise self._error(action, key, error) from error

    def _error(self, action: str, key: str, error: Exception) -> StoreError:
        """Return the StoreError for an error of a backend; key "" stands for the whole location."""
        if self._is_http and isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
            error = error.__cause__  # fsspec raises FileNotFoundError for every failure of an HTTP request
        status, reason = _status(error), _said(error) or type(error).__name__
        where = f"{self.location.description}/{key}" if key else self.location.description
        if status in {404, 410} or isinstance(error, FileNotFoundError | IsADirectoryError):
            whole = StoreMissing(f"{where} does not exist: see {self.location.setting}")
            return NotFound(key) if key or action == "read" else whole
        if isinstance(error, PermissionError) or (400 <= status < 500 and status not in _TRANSIENT_STATUS):
            return StoreForbidden(f"{where} can't be {action}: access was denied ({reason}); {self.location.advice}")
        kind = StoreError if isinstance(error, _FINAL) else Transient if key else StoreUnreachable
        return kind(f"{where} can't be {action}: {reason}")


def _status(error: Exception) -> int:
    """Return the HTTP status of an error; 0 if it has none."""
    return int(getattr(error, "status", None) or 0)


def _said(error: Exception) -> str:
    message = getattr(error, "message", None)
    text = f"{_status(error)} {message}" if _status(error) and message else str(error)
    return hide_credentials(" ".join(text.split()))[:200]


def _size(about: Mapping[str, Any]) -> int:
    size = about.get("size")
    return UNKNOWN_SIZE if size is None else int(size)


def _version(about: Mapping[str, Any]) -> str:
    return next((str(about[name]).strip('"') for name in _VERSION_FIELDS if about.get(name)), "")
