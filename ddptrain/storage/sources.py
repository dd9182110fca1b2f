"""Opens places that are read: folders of this machine, object stores, and what else fsspec knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ddptrain.storage.store import (
    OBJECT_STORES,
    Limits,
    LocalFolder,
    Location,
    NotFound,
    Source,
    StoreMissing,
)

DEFAULTS = Limits()


def open_source(location: Location, limits: Limits = DEFAULTS) -> Source:
    """Open a location in this process; no request is sent yet. Raises UsageError for unknown options; StoreError."""
    # The backends are imported here: obstore and fsspec start threads, which a process must not have if it forks.
    if location.protocol == "file":
        return LocalFolder(location)
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
        yield from open_source(location, limits).chunks(key)
    except (NotFound, StoreMissing) as error:
        if isinstance(error, StoreMissing) and location.protocol != "file":
            raise
        raise StoreMissing(f"{Location.of(where, {}).description} does not exist") from None
