"""A folder of a store that this process writes: reads with a size limit, retries, and a guard before each change."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ddptrain.errors import UsageError
from ddptrain.file_ops import atomic_file
from ddptrain.storage.store import (
    OBJECT_STORES,
    Limits,
    Listed,
    Location,
    NotFound,
    Store,
    StoreError,
    StoreMissing,
    StoreUnreachable,
    Transient,
    Versioned,
    open_store,
)

SMALL_BYTES = 64 << 20  # records, manifests, locks, pointers: another user may have written a huge object instead
LIMITS = Limits(timeout_s=120.0)  # four parts of 8 MiB that are uploaded at a time need 280 kB/s
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
_READERS = 16
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_PASSING = (Transient, StoreUnreachable)

T = TypeVar("T")


def is_url(text: str) -> bool:
    """Return whether the text has a scheme, like s3://bucket/runs, and so is not the path of a folder."""
    return _URL.match(text) is not None


def is_plain(path: str) -> bool:
    """Return whether a path stays below the folder that it is joined to."""
    parts = path.split("/")
    return not {"", ".", ".."} & set(parts) and "\\" not in path and path.isprintable()


def _starts(files: Mapping[str, Listed | None], have_bytes: int) -> Iterator[tuple[str, int]]:
    """Yield the files that are not completely among the first `have_bytes`, each with the number of bytes to skip."""
    for path, listed in files.items():
        size_bytes = listed.size_bytes if listed else 0
        if have_bytes < size_bytes or not have_bytes:
            yield path, have_bytes
        have_bytes = max(0, have_bytes - size_bytes)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """A folder of a store; paths are relative to it. Failures that may pass are tried again; all raise StoreError.

    wait: waits before the next attempt; returns True if there is no time for another one.
    guard: is called before each change; raises if this process must not change the store any more.
    """

    store: Store
    path: str = ""
    wait: Callable[[float], bool] = _sleep
    pauses_s: Sequence[float] = _PAUSES_S
    guard: Callable[[], None] = lambda: None

    @classmethod
    def open(cls, url: str, limits: Limits = LIMITS) -> RemoteFolder:
        """Open the folder at that URL; no request is sent yet. Raises UsageError if the URL or its scheme is wrong."""
        scheme, _, rest = url.rstrip("/").partition("://")
        if not rest.strip("/"):
            raise UsageError(f"cannot keep runs in {url}: give a bucket or a folder, as s3://bucket/runs")
        location = Location(f"{scheme.lower()}://{rest}", {}, "results.dir")
        if location.protocol not in OBJECT_STORES:
            raise UsageError(
                f"cannot keep runs or models in {location.description}: give a path, or a bucket of S3, Google Cloud "
                "Storage or Azure, as s3://bucket/runs"
            )
        return cls(open_store(location, limits))

    def with_limits(self, limits: Limits) -> RemoteFolder:
        """Return the same folder with other time limits, which only object stores have."""
        location = self.store.location
        return replace(self, store=open_store(location, limits)) if location.protocol in OBJECT_STORES else self

    @property
    def url(self) -> str:
        """The address of the folder, without credentials."""
        where = self.store.location.description
        return f"{where}/{self.path}" if self.path else where

    def below(self, name: str) -> RemoteFolder:
        """Return the folder of that name in it."""
        return replace(self, path=self._key(name))

    def check(self) -> None:
        """Check access with one request. Raises UsageError for a missing bucket; StoreForbidden, StoreUnreachable."""
        try:
            self.store.check()
        except StoreMissing as error:
            bucket = self.url.partition("://")[2].partition("/")[0]
            raise UsageError(f"cannot keep runs in {self.url}: there is no bucket {bucket}; create it first") from error

    def read(self, path: str, limit_bytes: int = SMALL_BYTES) -> bytes | None:
        """Return a small file; None if it does not exist. Raises TooLarge."""
        try:
            return self._call(lambda: self.store.get(self._key(path), limit_bytes=limit_bytes))
        except NotFound:
            return None

    def read_all(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Return small files, several at a time; files that do not exist are left out."""
        if not paths:
            return {}
        with ThreadPoolExecutor(min(_READERS, len(paths)), thread_name_prefix="ddptrain-store") as pool:
            contents = dict(zip(paths, pool.map(self.read, paths), strict=True))
        return {path: data for path, data in contents.items() if data is not None}

    def write(self, path: str, data: bytes | Path) -> None:
        """Replace a file by these bytes, or by the content of a local file."""
        self._change(lambda: self.store.put(self._key(path), data))

    def fetch(self, paths: str | Mapping[str, Listed], target: Path, have_bytes: int = 0, time_ns: int = 0) -> None:
        """Replace a local file by one of the store, or by several that are joined. Raises NotFound, StoreError.

        have_bytes: the local file begins with so many bytes of the joined ones, which stay. time_ns: the new
        modification time of the local file; 0: the time now.
        """

        def download() -> None:
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(target, durable=False) as file:
                if have_bytes:
                    with target.open("rb") as before:
                        file.write(before.read(have_bytes))
                for path, skip in _starts({paths: None} if isinstance(paths, str) else paths, have_bytes):
                    key = self._key(path)
                    for chunk in [self.store.get(key, start=skip)] if skip else self.store.chunks(key):
                        file.write(chunk)
                if time_ns:
                    file.flush()
                    os.utime(file.fileno(), ns=(time_ns, time_ns))

        try:
            self._call(download)
        except OSError as error:
            where = paths if isinstance(paths, str) else next(iter(paths))
            why = error.strerror or error
            raise StoreError(f"{self.url}/{where} can't be downloaded: cannot write {target}: {why}") from error

    def files(self, folder: str = "") -> dict[str, Listed]:
        """Return every file below a folder, by its path from here."""
        skip = len(self.path) + 1 if self.path else 0
        start = self._key(folder) if folder else self.path

        def listed() -> dict[str, Listed]:
            try:
                return {item.key[skip:]: item for item in self.store.listing(start)}
            except StoreMissing:  # the folder comes with its first file; check() has seen that the bucket exists
                return {}

        return self._call(listed)

    def folders(self) -> list[str]:
        """Return the names of the folders in it."""
        return self._call(lambda: self.store.folders(self.path))

    def remove(self, path: str) -> None:
        """Delete a file; one that does not exist is no error."""
        try:
            self._change(lambda: self.store.delete(self._key(path)))
        except NotFound:
            return

    def read_versioned(self, path: str) -> Versioned | None:
        """Return a file for a conditional write; see Store.get_versioned."""
        return self._call(lambda: self.store.get_versioned(self._key(path)))

    def write_versioned(self, path: str, data: bytes, before: Versioned | None) -> Versioned:
        """Write a file that is unchanged since `before`; see Store.put_versioned."""
        return self._change(lambda: self.store.put_versioned(self._key(path), data, before))

    def test_conditions(self, probe: str) -> float:
        """Test that the store keeps the conditions of writes, and return its time; see Store.test_conditions."""
        return self._call(lambda: self.store.test_conditions(self._key(probe)))

    def _key(self, path: str) -> str:
        return f"{self.path}/{path}" if self.path else path

    def _change(self, work: Callable[[], T]) -> T:
        self.guard()
        return self._call(work)

    def _call(self, work: Callable[[], T]) -> T:
        """Call `work`, and repeat it after temporary failures."""
        for pause_s in self.pauses_s:
            try:
                return work()
            except _PASSING:
                if self.wait(pause_s):
                    raise
        return work()
