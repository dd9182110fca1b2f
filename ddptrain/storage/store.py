"""What every store has: where it is, what it can do, and how it fails; and folders of this machine.

The other backends are in modules of their own.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

from ddptrain.errors import DdptrainError, ExitCode
from ddptrain.redact import hide_credentials

BUILTIN = "builtin"  # the synthetic images of the images workload
UNKNOWN_SIZE = -1
OBJECT_STORES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
SMALL_BYTES = 64 << 20  # records, manifests, locks, pointers: another user may have written a huge object instead
_READERS = 16
_CHUNK_BYTES = 1 << 20
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
T = TypeVar("T")


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
    """The object has more bytes than the caller reads."""


class WriteConflict(StoreError):
    """The condition of a write was not met: another process has written the object."""


class NoConditionalWrites(StoreError):
    """The store has no conditional writes; the message says why."""


# --- Locations ---


def is_url(text: str) -> bool:
    """Return whether the text has a scheme, like s3://bucket/runs, and so is not the path of a folder."""
    return _URL.match(text) is not None


def is_plain(path: str) -> bool:
    """Return whether a path stays below the folder that it is joined to."""
    parts = path.split("/")
    return not {"", ".", ".."} & set(parts) and "\\" not in path and path.isprintable()


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
        path = source.removeprefix("file:").removeprefix("//") if source.startswith("file:") else source
        if source == BUILTIN:
            url = source
        elif "://" not in path:
            url = os.path.abspath(os.path.expanduser(path))
        else:
            protocol, _, rest = path.partition("://")
            url = f"{protocol.lower()}://{rest.rstrip('/')}"
        return cls(url, dict(options), setting)

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
        credentials = "check the credentials (for S3: AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL)"
        return f"see {self.options_setting}" if self.options_setting else credentials

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


class Source(ABC):
    """An open location, for reading. Threads may share it; a process that was forked afterwards may not.

    All methods raise StoreForbidden, StoreUnreachable and Transient; StoreMissing if the location does not exist.
    """

    location: Location

    @abstractmethod
    def listing(self, folder: str = "") -> Iterator[Listed]:
        """Yield every object below the location, or below a folder of it. A missing folder has no objects."""

    @abstractmethod
    def get(self, key: str, *, start: int = 0, limit_bytes: int | None = None) -> bytes:
        """Return an object's content from byte `start` on. Raises NotFound; StoreError above `limit_bytes`."""

    @abstractmethod
    def chunks(self, key: str) -> Iterator[bytes]:
        """Yield the content of an object of any size in pieces. Raises NotFound."""

    def _limited(self, key: str, data: bytes, limit_bytes: int | None) -> bytes:
        if limit_bytes is not None and len(data) > limit_bytes:
            raise self._too_large(key, limit_bytes)
        return data

    def _too_large(self, key: str, limit_bytes: int) -> TooLarge:
        return TooLarge(f"{self.location.description}/{key} can't be read: it has more than {limit_bytes:,} bytes")


class LocalFolder(Source):
    """A folder of this machine. Symbolic links are followed; a folder is entered once."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self.folder = Path(location.url)

    def listing(self, folder: str = "") -> Iterator[Listed]:
        """See Source."""
        if not self.folder.is_dir():
            what = "is not a folder" if self.folder.exists() else "does not exist"
            want = f"{self.location.setting} must be a folder with one folder of images for each class"
            raise StoreMissing(f"{self.folder} {what}: {want}")

        def refuse(error: OSError) -> None:
            kind = StoreForbidden if isinstance(error, PermissionError) else StoreUnreachable
            raise kind(f"{self.folder} can't be read: {error}") from error

        root, entered = str(self.folder), set()
        for place, folders, names in os.walk(str(self.folder / folder), onerror=refuse, followlinks=True):
            state = os.stat(place)
            if (state.st_dev, state.st_ino) in entered:  # links may lead in a circle
                folders.clear()
                continue
            entered.add((state.st_dev, state.st_ino))
            folders.sort()
            prefix = "" if place == root else f"{place[len(root) + 1 :]}/"
            for name in sorted(names):
                with suppress(FileNotFoundError):  # a link to nothing
                    about = os.stat(f"{place}/{name}")
                    if stat.S_ISREG(about.st_mode):
                        version = f"{about.st_mtime_ns:x}-{about.st_ino:x}"
                        yield Listed(prefix + name, about.st_size, version, about.st_mtime)

    def get(self, key: str, *, start: int = 0, limit_bytes: int | None = None) -> bytes:
        """See Source."""
        try:
            with self._open(key) as file:
                file.seek(start)
                data = file.read(-1 if limit_bytes is None else limit_bytes + 1)
        except OSError as error:
            raise self._read_error(key, error) from None
        return self._limited(key, data, limit_bytes)

    def chunks(self, key: str) -> Iterator[bytes]:
        """See Source."""
        try:
            with self._open(key) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
        except OSError as error:
            raise self._read_error(key, error) from None

    def _open(self, key: str) -> BinaryIO:
        return (self.folder / key).open("rb")

    def _read_error(self, key: str, error: OSError) -> StoreError:
        """Return the error for a file that can't be read: it alone may be missing, or the whole folder."""
        if not isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
            kind = StoreForbidden if isinstance(error, PermissionError) else Transient
            return kind(f"{self.folder / key} can't be read: {error}")
        here = f"on {socket.gethostname()}"
        if not os.path.isdir(self.folder):
            return StoreMissing(f"the folder {self.folder} does not exist {here}: every rank must be able to read it")
        with suppress(OSError):
            if not os.listdir(self.folder):  # an empty mount point
                return StoreMissing(f"the folder {self.folder} is empty {here}: is its file system mounted?")
        return NotFound(key)


class Store(Source):
    """A folder of runs or models, which this process may write. Keys and paths are relative to it.

    The methods below try failures that may pass again, after pauses_s.
    """

    pauses_s: Sequence[float] = ()

    @property
    @abstractmethod
    def url(self) -> str:
        """The address of the folder, without credentials."""

    @abstractmethod
    def below(self, name: str) -> Self:
        """Return the folder of that name in it."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Return the names of the folders in it; none if it does not exist."""

    @abstractmethod
    def write(self, path: str, data: bytes | Path) -> None:
        """Replace an object by these bytes, or by the content of a local file."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Delete an object; one that does not exist is no error."""

    @abstractmethod
    def read_versioned(self, path: str) -> Versioned | None:
        """Return an object for a conditional write; None if it does not exist."""

    @abstractmethod
    def write_versioned(self, path: str, data: bytes, before: Versioned | None) -> Versioned:
        """Write an object that is unchanged since `before` (None: new). Raises WriteConflict, NoConditionalWrites."""

    def read(self, path: str, limit_bytes: int = SMALL_BYTES) -> bytes | None:
        """Return a small object; None if it does not exist. Raises StoreError if it is larger."""
        try:
            return self._again(lambda: self.get(path, limit_bytes=limit_bytes))
        except NotFound:
            return None

    def read_all(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Return small objects, several at a time; those that do not exist are left out."""
        from concurrent.futures import ThreadPoolExecutor  # not for processes that read images

        with ThreadPoolExecutor(max(1, min(_READERS, len(paths))), thread_name_prefix="ddptrain-store") as pool:
            contents = dict(zip(paths, pool.map(self.read, paths), strict=True))
        return {path: data for path, data in contents.items() if data is not None}

    def files(self, folder: str = "") -> dict[str, Listed]:
        """Return every object below a folder, by its path from here."""

        def listed() -> dict[str, Listed]:
            try:
                return {item.key: item for item in self.listing(folder)}
            except StoreMissing:  # the folder comes with its first object
                return {}

        return self._again(listed)

    def _joined(self, objects: Mapping[str, int], skip: int) -> Iterator[bytes]:
        """Yield the content of objects of these sizes, one after the other, without the first `skip` bytes."""
        if len(objects) == 1 and not skip:
            yield from self.chunks(*objects)
            return
        from concurrent.futures import ThreadPoolExecutor

        starts = []
        for path, size_bytes in objects.items():
            if skip < size_bytes or not skip:
                starts.append((path, skip))
            skip = max(0, skip - size_bytes)
        with ThreadPoolExecutor(_READERS, thread_name_prefix="ddptrain-store") as pool:
            for at in range(0, len(starts), _READERS):
                yield from pool.map(lambda one: self.get(one[0], start=one[1]), starts[at : at + _READERS])

    def fetch(self, paths: str | Mapping[str, Listed], target: Path, have_bytes: int = 0, time_ns: int = 0) -> None:
        """Replace a local file by an object, or by several that are joined. Raises NotFound, StoreError.

        have_bytes: the local file begins with so many bytes of the joined ones, which stay. time_ns: the new
        modification time of the local file; 0: the time now.
        """
        objects = {paths: 0} if isinstance(paths, str) else {path: each.size_bytes for path, each in paths.items()}

        from ddptrain.file_ops import atomic_file  # ranks, which read images, do not need it

        def download() -> None:
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(target, durable=False) as file:
                if have_bytes:
                    with target.open("rb") as before:
                        file.write(before.read(have_bytes))
                for chunk in self._joined(objects, have_bytes):
                    file.write(chunk)
                if time_ns:
                    file.flush()
                    os.utime(file.fileno(), ns=(time_ns, time_ns))

        try:
            self._again(download)
        except OSError as error:
            raise StoreError(
                f"{self.url}/{next(iter(objects))} can't be downloaded: cannot write {target}: "
                f"{error.strerror or error}"
            ) from error

    def _again(self, work: Callable[[], T]) -> T:
        for pause_s in self.pauses_s:
            try:
                return work()
            except (Transient, StoreUnreachable):
                time.sleep(pause_s)
        return work()
