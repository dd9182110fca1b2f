"""A store in memory that writes down what is asked of it, and fails when told to."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from ddptrain.storage.fsspec_store import FsspecStore
from ddptrain.storage.remote_folder import RemoteFolder
from ddptrain.storage.store import Location

_WRITES = ("pipe_file", "put_file", "rm_file")


class WatchedFs:
    """fsspec's memory, with a list of the writes, and errors for the next calls."""

    def __init__(self) -> None:
        self.memory = MemoryFileSystem()
        self.writes: list[str] = []
        self.errors: list[Exception] = []
        self.fails: Callable[[str], Exception | None] = lambda path: None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.memory, name)
        if not callable(method):
            return method

        def call(*args: Any, **options: Any) -> Any:
            path = args[1] if name == "put_file" else args[0]
            if self.errors:
                raise self.errors.pop(0)
            if name in _WRITES and (error := self.fails(str(path))) is not None:
                raise error
            if name in _WRITES:
                self.writes.append(f"{'-' if name == 'rm_file' else ''}{path}")
            return method(*args, **options)

        return call


def watched_store() -> tuple[RemoteFolder, WatchedFs]:
    """A store of its own, with two quick retries."""
    fs, root = WatchedFs(), f"/{uuid.uuid4().hex}"
    store = FsspecStore(Location(f"memory:/{root}", {}, "results.dir"), fs, root, timeout_s=1.0)
    return RemoteFolder(store, wait=lambda seconds: False, pauses_s=(0.0, 0.0)), fs


def watched_fs(store: RemoteFolder) -> WatchedFs:
    """The file system behind a folder of watched_store()."""
    assert isinstance(store.store, FsspecStore) and isinstance(store.store.fs, WatchedFs)
    return store.store.fs


def root_of(store: RemoteFolder) -> str:
    """The folder's path in its file system."""
    assert isinstance(store.store, FsspecStore)
    return f"{store.store.root}/{store.path}".rstrip("/")
