"""Where images lie: a folder, an object store, or whatever fsspec knows; listed in one pass, read key by key."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from ddptrain.errors import DdptrainError, ExitCode
from ddptrain.redact import hide_credentials

BUILTIN = "builtin"
UNKNOWN_SIZE = -1
OBJECT_STORES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}


class StoreError(DdptrainError):
    """A source of images can't be used.

    StoreError          4
    ├── StoreMissing    2  there is no such bucket or folder
    ├── StoreForbidden  2  the store knows us, or does not, and says no
    ├── StoreUnreachable 4 it does not answer, or not in time
    ├── Transient       4  this request failed; another try may not
    └── NotFound        4  one key is not there (any more)
    """

    exit_code = ExitCode.CLUSTER


class StoreMissing(StoreError):
    """There is no such bucket or folder."""

    exit_code = ExitCode.USAGE


class StoreForbidden(StoreError):
    """The store refuses us: the credentials are wrong, missing, or allow too little."""

    exit_code = ExitCode.USAGE


class StoreUnreachable(StoreError):
    """The store does not answer, or not in time."""


class Transient(StoreError):
    """This request failed for a reason that passes: another try may succeed."""


class NotFound(StoreError):
    """One key is not there (any more)."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"{key} is not there")


@dataclass(frozen=True, slots=True)
class Listed:
    """One file: its key below the location, -1 and "" where the store does not tell size or version."""

    key: str
    size_bytes: int
    version: str


class Store(Protocol):
    """An open location. Threads may share it; a process that was forked afterwards may not."""

    def listing(self) -> Iterator[Listed]:
        """Every file below the location, in one pass over all pages.

        Raises: StoreMissing, StoreForbidden, StoreUnreachable.
        """

    def get(self, key: str) -> bytes:
        """A file as a whole.

        Raises: NotFound; Transient where another try may help; StoreForbidden; StoreMissing where the whole location
        is not there (any more).
        """


class _Source(Protocol):
    """What ImagesParams says of it."""

    @property
    def source(self) -> str: ...
    @property
    def source_options(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Location:
    """A place that holds images: an absolute path, or a URL without a slash at its end. `options` may be secret."""

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def at(cls, params: _Source) -> Self:
        """The source of the parameters; a path is relative to the working directory, and ~ is the home folder."""
        return cls.of(params.source, params.source_options)

    @classmethod
    def of(cls, source: str, options: Mapping[str, Any]) -> Self:
        """A path or URL as it is written in a configuration, and the options of its store."""
        return cls(_absolute(source), dict(options))

    @property
    def protocol(self) -> str:
        """As s3; "file" for a path; "builtin" for the drawings."""
        if self.url == BUILTIN:
            return BUILTIN
        return self.url.partition("://")[0].lower() if "://" in self.url else "file"

    @property
    def words(self) -> str:
        """The place as people know it, credentials left out."""
        if OBJECT_STORES.get(self.protocol) == "az" and ":" not in self.url.partition("://")[2].partition("@")[0]:
            return self.url  # abfs://container@account: a name is before the @, nothing secret
        return hide_credentials(self.url)

    def __repr__(self) -> str:
        return f"Location({self.words!r})"


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request may take, and how often and for how long it is repeated."""

    timeout_s: float
    connect_timeout_s: float
    retries: int
    patience_s: float


def open_store(
    location: Location,
    *,
    timeout_s: float = 10.0,
    connect_timeout_s: float = 5.0,
    retries: int = 0,
    patience_s: float = 10.0,
) -> Store:
    """Open a location in this process; nothing is asked of it yet.

    `timeout_s` bounds one request, its answer included. One that failed for a reason that passes is repeated up to
    `retries` times, but not begun again later than `patience_s` after its first begin.

    Raises: UsageError for options that are unknown; StoreError.
    """
    if location.protocol == BUILTIN:
        from ddptrain.storage.synthetic import Drawings

        return Drawings()
    if location.protocol == "file":
        return _Folder(location)
    if location.protocol in OBJECT_STORES:
        from ddptrain.storage.object_store import open_object_store

        return open_object_store(location, Patience(timeout_s, connect_timeout_s, retries, patience_s))
    from ddptrain.storage.fsspec_store import open_any_store

    return open_any_store(location, timeout_s, connect_timeout_s)


def fetch(where: str, options: Mapping[str, Any] | None = None, *, timeout_s: float = 60.0) -> bytes:
    """One small file, by its path or URL, tried again where that helps.

    Raises: UsageError for options that are unknown; StoreError.
    """
    location = Location(_absolute(where), dict(options or {}))
    folder, _, name = location.url.rpartition("/")
    store = open_store(Location(folder, location.options), timeout_s=timeout_s, retries=2)
    try:
        return store.get(name)
    except NotFound:
        raise StoreMissing(f"{location.words} does not exist") from None


def _absolute(source: str) -> str:
    """A URL less its last slashes, or a path as it is from anywhere."""
    if source == BUILTIN:
        return source
    if source.startswith("file:"):
        source = source.removeprefix("file:")
        source = source.removeprefix("//") if source.startswith("//") else source
    if "://" not in source:
        return os.path.abspath(os.path.expanduser(source))
    protocol, _, rest = source.partition("://")
    return f"{protocol.lower()}://{rest.rstrip('/')}"


class _Folder:
    """A folder of this machine. Its links are followed; a folder is entered once, so that circles end."""

    def __init__(self, location: Location) -> None:
        self._root = Path(location.url)

    def listing(self) -> Iterator[Listed]:
        if not self._root.is_dir():
            what = "is not a folder" if self._root.exists() else "does not exist"
            raise StoreMissing(f"{self._root} {what}: params.source is the folder that holds a folder for each class")
        try:
            yield from self._below(self._root, "", set())
        except PermissionError as error:
            raise StoreForbidden(f"{self._root} can't be read: {error}") from error
        except OSError as error:
            raise StoreUnreachable(f"{self._root} can't be read: {error}") from error

    def _below(self, folder: Path, prefix: str, entered: set[tuple[int, int]]) -> Iterator[Listed]:
        state = folder.stat()
        identity = (state.st_dev, state.st_ino)
        if identity in entered:
            return
        entered.add(identity)
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            key = f"{prefix}{entry.name}"
            if entry.is_dir():
                yield from self._below(folder / entry.name, f"{key}/", entered)
            elif entry.is_file():
                about = entry.stat()
                yield Listed(key, about.st_size, f"{about.st_mtime_ns:x}-{about.st_ino:x}")

    def get(self, key: str) -> bytes:
        try:
            return (self._root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise self._gone(key) from None
        except PermissionError as error:
            raise StoreForbidden(f"{self._root / key} can't be read: {error}") from error
        except OSError as error:
            raise Transient(f"{self._root / key} can't be read: {error}") from error

    def _gone(self, key: str) -> StoreError:
        """What it means that a file is not there: it is gone alone, or with all the others."""
        here = f"on {socket.gethostname()}"
        try:
            if not self._root.is_dir():
                return StoreMissing(f"the folder {self._root} is not there {here}: every rank has to see it")
            with os.scandir(self._root) as entries:
                if next(entries, None) is None:  # what is left where something was mounted
                    return StoreMissing(f"the folder {self._root} is empty {here}: is what it holds mounted?")
        except PermissionError:
            pass
        except OSError as error:
            return Transient(f"{self._root} can't be read: {error}")
        return NotFound(key)
