"""The interface of every store: where it is, what it can do, and how it fails. `open_store` chooses the backend."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ddptrain.errors import DdptrainError, ExitCode
from ddptrain.redact import hide_credentials

BUILTIN = "builtin"
UNKNOWN_SIZE = -1
OBJECT_STORES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
_CREDENTIALS = "check the credentials (for S3: AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL)"


# --- Errors ---


class StoreError(DdptrainError):
    """A request to a store failed."""

    exit_code = ExitCode.CLUSTER


class StoreMissing(StoreError):
    """The bucket or folder does not exist."""

    exit_code = ExitCode.USAGE


class StoreForbidden(StoreError):
    """The store refuses the request: the credentials are wrong, missing, or do not allow it."""

    exit_code = ExitCode.USAGE


class StoreUnreachable(StoreError):
    """The store does not answer, or not in time."""


class Transient(StoreError):
    """This request failed; another attempt may succeed."""


class NotFound(StoreError):
    """This key does not exist."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"{key} is not there")


class TooLarge(StoreError):
    """The object is larger than the reader accepts."""


class WriteConflict(StoreError):
    """The condition of a write was not met: another process has written the object."""


class NoConditionalWrites(StoreError):
    """The store has no conditional writes; the message says why."""


# --- Locations and options ---


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a store: an absolute path, or a URL without a slash at its end. `options` may be secret.

    setting: the configuration field that names the place; error messages refer to it.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    setting: str = field(default="params.source", compare=False)

    @classmethod
    def of(cls, source: str, options: Mapping[str, Any], setting: str = "params.source") -> Self:
        """Return the location of a path or URL of a configuration; a path is relative to the working directory or ~."""
        return cls(_absolute(source), dict(options), setting)

    @property
    def protocol(self) -> str:
        """The scheme, such as s3; "file" for a path; "builtin" for the synthetic images."""
        if self.url == BUILTIN:
            return BUILTIN
        return self.url.partition("://")[0].lower() if "://" in self.url else "file"

    @property
    def description(self) -> str:
        """The location for messages, without credentials."""
        if OBJECT_STORES.get(self.protocol) == "az" and ":" not in self.url.partition("://")[2].partition("@")[0]:
            return self.url  # abfs://container@account: the part before the @ is a name
        return hide_credentials(self.url)

    @property
    def options_setting(self) -> str:
        """The configuration field with the store's options; "" if all options come from the environment."""
        if not self.setting.startswith("params."):
            return ""
        # One parameter has the options of both sources of images.
        return "params.names_options" if self.setting == "params.names" else "params.source_options"

    @property
    def advice(self) -> str:
        """What the user can do if the store refuses a request."""
        return f"see {self.options_setting}" if self.options_setting else _CREDENTIALS

    def __repr__(self) -> str:
        return f"Location({self.description!r})"


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a request may take, and how often it is repeated.

    timeout_s: of one request with its answer; large objects take several requests.
    retries: of a request whose failure may pass; none begins later than `patience_s` after the first attempt.
    """

    timeout_s: float = 10.0
    connect_timeout_s: float = 5.0
    retries: int = 0
    patience_s: float = 10.0


def _absolute(source: str) -> str:
    """Return a URL without slashes at its end, or an absolute path."""
    if source == BUILTIN:
        return source
    if source.startswith("file:"):
        source = source.removeprefix("file:")
        source = source.removeprefix("//") if source.startswith("//") else source
    if "://" not in source:
        return os.path.abspath(os.path.expanduser(source))
    protocol, _, rest = source.partition("://")
    return f"{protocol.lower()}://{rest.rstrip('/')}"


# --- Stores ---


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a listing: its key below the location; -1, "" and 0 if the store does not report a value.

    modified_s: when it was written, in seconds since 1970 by the store's clock.
    """

    key: str
    size_bytes: int
    version: str
    modified_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Versioned:
    """An object as it was read or written.

    version: names this state of the object, for conditional writes. written_s: when it was written, in seconds since
    1970 by the store's clock; None if it is not known.
    """

    data: bytes
    version: Mapping[str, str] = field(default_factory=dict)
    written_s: float | None = None


class Store(ABC):
    """An open location. Threads may share it; a process that was forked afterwards may not.

    All methods raise StoreForbidden, StoreUnreachable and Transient; StoreMissing if the location does not exist.
    A store of images or data implements listing() and get(); one of runs or models all methods.
    """

    def __init__(self, location: Location) -> None:
        self.location = location

    @abstractmethod
    def listing(self, folder: str = "") -> Iterator[Listed]:
        """Yield every object below the location, or below a folder of it. A missing folder has no objects."""

    @abstractmethod
    def get(self, key: str, *, start: int = 0, limit_bytes: int | None = None) -> bytes:
        """Return an object's content from byte `start` on. Raises NotFound; TooLarge above `limit_bytes`."""

    def chunks(self, key: str) -> Iterator[bytes]:
        """Yield the content of an object of any size in pieces. Raises NotFound."""
        yield self.get(key)

    def folders(self, folder: str = "") -> list[str]:
        """Return the names of the folders in the location, or in a folder of it; none if it does not exist."""
        raise self._read_only()

    def check(self) -> None:
        """Ask the store once whether the location can be used. Raises StoreMissing if its bucket does not exist."""
        self.folders()

    def put(self, key: str, data: bytes | Path) -> None:
        """Replace an object by these bytes, or by the content of a local file."""
        raise self._read_only()

    def delete(self, key: str) -> None:
        """Delete an object. Raises NotFound if the store says that it did not exist."""
        raise self._read_only()

    def get_versioned(self, key: str) -> Versioned | None:
        """Return an object for a conditional write; None if it does not exist. Raises NoConditionalWrites."""
        raise NoConditionalWrites(f"{self.location.protocol} has none")

    def put_versioned(self, key: str, data: bytes, before: Versioned | None) -> Versioned:
        """Write an object that is unchanged since `before` (None: new). Raises WriteConflict, NoConditionalWrites."""
        raise NoConditionalWrites(f"{self.location.protocol} has none")

    def test_conditions(self, probe: str) -> float:
        """Return the store's time in seconds since 1970, after a test that it keeps the conditions of writes.

        probe: the key of an object that no other process uses; it is written and deleted.

        Raises NoConditionalWrites if the store ignores conditions, or has no such writes.
        """
        raise NoConditionalWrites(f"{self.location.protocol} has none")

    def _read_only(self) -> StoreError:
        return StoreError(f"{self.location.description} can't be written: {self.location.protocol}:// can only be read")

    def _limited(self, key: str, data: bytes, limit_bytes: int | None) -> bytes:
        if limit_bytes is not None and len(data) > limit_bytes:
            raise self._too_large(key, limit_bytes)
        return data

    def _too_large(self, key: str, limit_bytes: int) -> TooLarge:
        return TooLarge(f"{self.location.description}/{key} can't be read: it has more than {limit_bytes:,} bytes")


def open_store(location: Location, limits: Limits = Limits()) -> Store:
    """Open a location in this process; no request is sent yet. Raises UsageError for unknown options; StoreError."""
    # The backends are imported here: obstore and fsspec start threads, which a process must not have if it forks.
    if location.protocol == BUILTIN:
        from ddptrain.storage.synthetic import SyntheticImages

        return SyntheticImages(location)
    if location.protocol == "file":
        from ddptrain.storage.folder import Folder

        return Folder(location)
    if location.protocol in OBJECT_STORES:
        from ddptrain.storage.object_store import open_object_store

        return open_object_store(location, limits)
    from ddptrain.storage.fsspec_store import open_fsspec_store

    return open_fsspec_store(location, limits)


def fetch(where: str, options: Mapping[str, Any], setting: str, limit_bytes: int) -> bytes:
    """Return the content of one small file, given by its path or URL. Raises UsageError, StoreError.

    A file larger than `limit_bytes`, or without end, is cut off after more than `limit_bytes`.
    """
    content = bytearray()
    for chunk in fetch_chunks(where, options, setting=setting, limits=Limits(timeout_s=60.0, retries=2)):
        content += chunk
        if len(content) > limit_bytes:
            break
    return bytes(content)


def fetch_chunks(where: str, options: Mapping[str, Any], *, setting: str, limits: Limits) -> Iterator[bytes]:
    """Yield the content of one file in pieces, given by its path or URL. Raises UsageError, StoreError."""
    location = Location.of(where, options, setting)
    key = ""
    if location.protocol == "file" or location.protocol in OBJECT_STORES:
        folder, _, key = location.url.rpartition("/")
        location = Location(folder, location.options, setting)
    try:
        yield from open_store(location, limits).chunks(key)
    except (NotFound, StoreMissing) as error:
        if isinstance(error, StoreMissing) and location.protocol != "file":
            raise
        raise StoreMissing(f"{Location.of(where, {}).description} does not exist") from None
