"""A store in memory that notes the writes, and fails when a test asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import PreconditionError
from obstore.store import LocalStore, MemoryStore

from ddptrain.storage.object_store import ObjectStore
from ddptrain.storage.store import Limits, Location


class WatchedStore:
    """obstore's store in memory, with a list of the writes, and errors for the next calls."""

    def __init__(self) -> None:
        self.memory: Any = MemoryStore()
        self.memory.put("first", b"")  # takes version "0", with which conditions are tested as a wrong one
        self.memory.delete("first")
        self.writes: list[str] = []
        self.errors: list[Exception] = []
        self.fails: Callable[[str], Exception | None] = lambda path: None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.memory, name)

        def call(*args: Any, **options: Any) -> Any:
            if self.errors:
                raise self.errors.pop(0)
            if name in ("put", "delete"):
                if (error := self.fails(str(args[0]))) is not None:
                    raise error
                self.writes.append(f"{'-' if name == 'delete' else ''}{args[0]}")
            return method(*args, **options)

        return call


class _SameLimits(ObjectStore):
    """A store that can't be opened again."""

    def with_limits(self, limits: Limits) -> ObjectStore:
        return self


def watched_store(name: str = "store") -> tuple[ObjectStore, WatchedStore]:
    """A folder in a store of its own, with two quick retries."""
    watched: Any = WatchedStore()
    location = Location(f"memory://{name}", {}, "results.dir")
    return _SameLimits(location, watched, Limits(), pauses_s=(0.0, 0.0)), watched


class _FolderStore:
    """obstore's store in a folder, which has conditional writes of new objects only; others are compared here."""

    def __init__(self, folder: str) -> None:
        self._store: Any = LocalStore(folder, mkdir=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, data: Any, *, mode: Any = "overwrite", **options: Any) -> Any:
        if isinstance(mode, dict):
            if self._store.head(key)["e_tag"] != mode["e_tag"]:
                raise PreconditionError("it was changed")
            mode = "overwrite"
        self._store.put(key, data, mode=mode, **options)
        return self._store.head(key)


def serve_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the bucket `bucket` be a folder of this machine, in this process; return its URL."""

    def opened(location: Location, limits: Limits) -> Any:
        return _FolderStore(str(folder / location.url.removeprefix("s3://bucket").strip("/")))

    monkeypatch.setattr("ddptrain.storage.object_store._open", opened)
    return "s3://bucket"
