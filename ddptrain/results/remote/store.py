"""An object store as a place for runs: fsspec's file systems with retries, and errors in one line."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ddptrain.errors import UsageError
from ddptrain.redact import hide_credentials
from ddptrain.results.errors import StoreError, naming

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
# What another try does not change.
_LASTING = (FileNotFoundError, PermissionError, ValueError, TypeError, NotImplementedError)
_LASTING_NAMES = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound")
_NEEDS = {"s3": "ddptrain[s3]", "s3a": "ddptrain[s3]", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
_CHANGES = ("write", "delete")

T = TypeVar("T")


def is_url(text: str) -> bool:
    """Whether it has a scheme, as s3://bucket/runs has, and so is no folder's path."""
    return _URL.match(text) is not None


def is_plain(path: str) -> bool:
    """Whether it stays below the folder that it is joined to."""
    parts = path.split("/")
    return not {"", ".", ".."} & set(parts) and "\\" not in path and path.isprintable()


@dataclass(frozen=True, slots=True)
class Stored:
    """A file in the store: its size, and a mark that changes with its content."""

    size_bytes: int
    mark: str


def _nothing() -> None:
    """Anybody may change what is in the store."""


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@dataclass(frozen=True, slots=True)
class Store:
    """A folder in an object store; paths are relative to it. Every method tries again before it raises StoreError.

    wait: takes the pauses between tries; True means that there is no time for another.
    guard: is called before each change, and raises where this process may make none any more.
    """

    url: str
    fs: Any
    root: str
    wait: Callable[[float], bool] = _wait
    pauses_s: Sequence[float] = _PAUSES_S
    guard: Callable[[], None] = _nothing

    @classmethod
    def open(cls, url: str) -> Store:
        """The folder at that address; nothing is asked of the store yet.

        Raises:
            UsageError: there is no such scheme, or what it needs is not installed.
        """
        from fsspec.core import url_to_fs

        scheme = url.partition("://")[0].lower()
        options = {"auto_mkdir": True} if scheme in ("file", "local") else {}
        try:
            fs, root = url_to_fs(url, use_listings_cache=False, **options)
        except ImportError as error:
            needs = _NEEDS.get(scheme)
            advice = f"pip install '{needs}'" if needs else _line(error)
            raise UsageError(f"cannot use {hide_credentials(url)}: a package is not installed: {advice}") from error
        except Exception as error:  # each file system has its own kinds
            raise UsageError(f"cannot use {hide_credentials(url)}: {_line(error)}") from error
        if not root.strip("/"):
            raise UsageError(f"cannot keep runs in {url}: give a bucket or a folder, as s3://bucket/runs")
        return cls(hide_credentials(url.rstrip("/")), fs, root.rstrip("/"))

    def below(self, name: str) -> Store:
        """The folder of that name in it."""
        return replace(self, url=f"{self.url}/{name}", root=f"{self.root}/{name}")

    def check(self) -> None:
        """Ask the store, once, for the folder.

        Raises:
            UsageError: its bucket is missing, or closed to us.
            StoreError: it can't be reached.
        """
        bucket = self.root.lstrip("/").partition("/")[0]
        try:
            self.call("list", "", lambda: self._listed(bucket), pauses_s=())
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise UsageError(
                    f"cannot keep runs in {self.url}: there is no bucket {bucket}; make it first"
                ) from error
            raise refused(error) from error

    def _listed(self, bucket: str) -> None:
        try:
            self.fs.ls(self.root, detail=False)
        except FileNotFoundError:
            if self.root == bucket:
                raise
            if not self.root.startswith("/"):  # a bucket must be there, folders come with their first file
                self.fs.ls(bucket, detail=False)

    def read(self, path: str) -> bytes | None:
        """A small file; None where there is none."""
        try:
            data: bytes = self.call("read", path, lambda: self.fs.cat_file(self._at(path)))
            return data
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def read_all(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Small files, at the same time where the store can; those that are missing are left out."""
        if not paths:
            return {}
        full = {self._at(path): path for path in paths}
        found = self.call("read", paths[0], lambda: self.fs.cat(list(full), on_error="return"))
        for path, data in found.items():
            if isinstance(data, Exception) and not isinstance(data, FileNotFoundError):
                raise self._error("read", full[path], data) from data
        return {full[path]: data for path, data in found.items() if isinstance(data, bytes)}

    def read_from(self, path: str, start: int) -> bytes:
        """What stands in a file from that byte on."""
        data: bytes = self.call("read", path, lambda: self.fs.cat_file(self._at(path), start=start))
        return data

    def write(self, path: str, data: bytes) -> None:
        """Replace a small file."""
        self.call("write", path, lambda: self.fs.pipe_file(self._at(path), data))

    def send(self, path: str, source: Path) -> None:
        """Replace a file by a local one, as it is now."""
        self.call("write", path, lambda: self.fs.put_file(str(source), self._at(path)))

    def fetch(self, path: str, target: Path) -> None:
        """Replace a local file by one of the store. Raises ResultsError as well."""
        beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        with naming(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.call("read", path, lambda: self.fs.get_file(self._at(path), str(beside)))
            with naming(target):
                os.replace(beside, target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise

    def files(self, folder: str = "") -> dict[str, Stored]:
        """Every file below a folder, by path from here."""
        start = self._at(folder) if folder else self.root
        found = self.call("list", folder, lambda: self.fs.find(start, detail=True))
        skip = len(self.root) + 1
        return {
            path[skip:]: Stored(int(info.get("size") or 0), _mark(info)) for path, info in found.items() if path[skip:]
        }

    def folders(self) -> list[str]:
        """The names of the folders in it."""
        try:
            entries = self.call("list", "", lambda: self.fs.ls(self.root, detail=True))
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return []
            raise
        names = (entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory")
        return sorted(names)

    def remove(self, path: str) -> None:
        """Delete a file; one that is gone is no error."""
        try:
            self.call("delete", path, lambda: self.fs.rm_file(self._at(path)))
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise

    def _at(self, path: str) -> str:
        return f"{self.root}/{path}"

    def call(self, action: str, path: str, work: Callable[[], T], pauses_s: Sequence[float] | None = None) -> T:
        """`work`, again after a pause where that may help. Raises StoreError."""
        if action in _CHANGES:
            self.guard()
        for pause_s in (*(self.pauses_s if pauses_s is None else pauses_s), None):
            try:
                return work()
            except Exception as error:  # each file system has its own kinds
                if pause_s is None or _lasts(error) or self.wait(pause_s):
                    raise self._error(action, path, error) from error
        raise AssertionError("the last try returns or raises")

    def _error(self, action: str, path: str, error: Exception) -> StoreError:
        where = f"{self.url}/{path}" if path else self.url
        return StoreError(f"cannot {action} {where}: {_line(error)}")


def refused(error: StoreError) -> UsageError | StoreError:
    """The error as one of usage, where another address or other credentials are what helps."""
    cause = error.__cause__
    if isinstance(cause, PermissionError) or type(cause).__name__ in _LASTING_NAMES:
        return UsageError(f"{error}; check the credentials (for S3: AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL)")
    if isinstance(cause, FileNotFoundError):
        return UsageError(f"{error}; is there such a bucket?")
    return error


def _lasts(error: Exception) -> bool:
    return isinstance(error, _LASTING) or type(error).__name__ in _LASTING_NAMES


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return hide_credentials(text) or type(error).__name__


def _mark(info: dict[str, Any]) -> str:
    for name in ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "mtime", "created"):
        if info.get(name) is not None:
            return str(info[name])
    return ""
