"""Whatever fsspec knows: pages of links over http(s), sftp, a folder in memory, ..."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

from ddptrain.errors import UsageError
from ddptrain.redact import hide_credentials
from ddptrain.storage.base import (
    UNKNOWN_SIZE,
    Listed,
    Location,
    NotFound,
    Store,
    StoreError,
    StoreForbidden,
    StoreMissing,
    StoreUnreachable,
    Transient,
)

_HTTP = ("http", "https")
_FACTS = ("ETag", "etag", "checksum", "md5", "mtime", "last_modified", "LastModified", "created")
_PAUSE_S = 0.5
_PASSES = {408, 425, 429, 500, 502, 503, 504}


def open_any_store(location: Location, timeout_s: float, connect_timeout_s: float) -> Store:
    """Raises: UsageError where fsspec does not know the protocol, a package, or an option."""
    import fsspec

    options = dict(location.options)
    if location.protocol in _HTTP:
        import aiohttp

        client = dict(options.pop("client_kwargs", {}))
        client.setdefault("timeout", aiohttp.ClientTimeout(total=timeout_s, connect=connect_timeout_s))
        options |= {"client_kwargs": client, "use_listings_cache": False}
    try:
        fs, root = fsspec.core.url_to_fs(location.url, **options)
    except (ConnectionError, TimeoutError, socket.gaierror) as error:  # some connect when they are made, as ftp does
        raise StoreUnreachable(f"{location.words} can't be opened: {_said(error)}: is it right, and up?") from None
    except Exception as error:  # each backend has errors of its own
        raise UsageError(
            f"params.source {location.words} can't be opened: {type(error).__name__}: {_said(error)}; "
            "see params.source_options"
        ) from None
    return _AnyStore(location, fs, str(root).rstrip("/"), timeout_s)


class _AnyStore:
    """A folder of a file system of fsspec."""

    def __init__(self, location: Location, fs: Any, root: str, timeout_s: float) -> None:
        self._location = location
        self._fs = fs
        self._root = root
        self._timeout_s = timeout_s
        self._is_http = location.protocol in _HTTP

    def listing(self) -> Iterator[Listed]:
        """Every file below the folder. Raises StoreMissing, StoreForbidden, StoreUnreachable."""
        where = self._location.words
        try:
            if not self._is_http and not self._fs.isdir(self._root):
                raise FileNotFoundError
            yield from self._below(f"{self._root}/", {f"{self._root}/"})
        except FileNotFoundError:
            raise StoreMissing(f"{where} does not exist: see params.source") from None
        except Exception as error:  # each backend has errors of its own
            if isinstance(error, PermissionError) or _status(error) in {401, 403}:
                raise StoreForbidden(
                    f"{where} can't be listed: it is refused ({_said(error)}): see params.source_options"
                ) from None
            raise StoreUnreachable(f"{where} can't be listed: {self._why(error)}") from None

    def _below(self, folder: str, entered: set[str]) -> Iterator[Listed]:
        # Not fs.find(): it leaves out, without a word, a folder whose listing fails.
        for about in self._entries(folder):
            path = str(about["name"])
            if about.get("type") != "directory":
                if path.startswith(f"{self._root}/"):
                    yield Listed(self._key(path), _size(about), _version(about))
            elif (inner := f"{path.rstrip('/')}/").startswith(f"{self._root}/") and inner not in entered:
                entered.add(inner)
                yield from self._below(inner, entered)

    def _entries(self, folder: str) -> Sequence[Mapping[str, Any]]:
        """What a folder holds, asked for twice where the first answer may be an accident."""
        for last in (False, True):
            try:
                entries: Sequence[Mapping[str, Any]] = self._fs.ls(folder, detail=True)
            except Exception as error:  # as above
                if last or not isinstance(self._get_error(folder, error), Transient):
                    raise
                time.sleep(_PAUSE_S)
            else:
                return entries
        raise AssertionError

    def get(self, key: str) -> bytes:
        """A file as a whole. Raises NotFound, Transient, StoreForbidden."""
        name = quote(key) if self._is_http else key
        try:
            # Without a key the location is the file: an address with a query can't be taken apart.
            return bytes(self._fs.cat_file(f"{self._root}/{name}" if key else self._root))
        except Exception as error:  # each backend has errors of its own
            raise self._get_error(key, error) from None

    def _get_error(self, key: str, error: Exception) -> StoreError:
        status = _status(error)
        if status in {404, 410} or isinstance(error, FileNotFoundError | IsADirectoryError):
            return NotFound(key)
        if isinstance(error, PermissionError) or (400 <= status < 500 and status not in _PASSES):
            return StoreForbidden(f"{self._location.words}/{key} can't be read: {_said(error)}")
        return Transient(f"{self._location.words}/{key}: {self._why(error)}")

    def _key(self, path: str) -> str:
        key = path[len(self._root) + 1 :]
        return unquote(key) if self._is_http else key

    def _why(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"it did not answer within {self._timeout_s:g} s"
        return _said(error) or type(error).__name__


def _status(error: Exception) -> int:
    """What a server of http has answered; 0 where it has not."""
    return int(getattr(error, "status", None) or 0)


def _said(error: Exception) -> str:
    message = getattr(error, "message", None)
    text = f"{_status(error)} {message}" if _status(error) and message else str(error)
    return hide_credentials(text.strip().partition("\n")[0])[:200]


def _size(about: Mapping[str, Any]) -> int:
    size = about.get("size")
    return UNKNOWN_SIZE if size is None else int(size)


def _version(about: Mapping[str, Any]) -> str:
    return next((str(about[name]).strip('"') for name in _FACTS if about.get(name)), "")
