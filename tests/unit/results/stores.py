"""A store in memory that writes down what is asked of it, and fails when told to."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from ddptrain.results.remote.store import Store

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


def watched_store() -> tuple[Store, WatchedFs]:
    """A store of its own, with one quick retry."""
    fs, root = WatchedFs(), f"/{uuid.uuid4().hex}"
    return Store(f"memory:/{root}", fs, root, wait=lambda seconds: False, pauses_s=(0.0, 0.0)), fs
