"""A folder of this machine with the verified files of a version, laid out like a run directory."""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path

from ddptrain.file_ops import hash_file, publish, sha256
from ddptrain.model_registry.model_reader import ModelReader
from ddptrain.model_registry.records import VersionRecord


def open_version(registry: ModelReader, record: VersionRecord) -> Path:
    """Return the folder of a version after a comparison of all files with its record.

    A version in an object store is copied into the user's cache once.

    Raises RegistryDamaged, which names the file; StoreError.
    """
    if (folder := registry.local_folder(record)) is not None:
        registry.verify(record)
        return folder
    copy = _copy_folder(registry, record)
    if not _is_complete(copy, record):
        incoming = copy.with_name(f".{copy.name}.{secrets.token_hex(4)}.tmp")
        try:
            incoming.mkdir(mode=0o700, parents=True)
            registry.fetch(record, incoming)
            shutil.rmtree(copy, ignore_errors=True)
            publish(incoming, copy)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
    return copy


def _copy_folder(registry: ModelReader, record: VersionRecord) -> Path:
    from platformdirs import user_cache_path

    slug = re.sub(r"[^A-Za-z0-9]+", "-", registry.where)[-40:].strip("-")
    place = f"{slug}-{sha256(registry.where.encode()).hexdigest()[:8]}"
    return user_cache_path("ddptrain", appauthor=False) / "models" / place / record.model / str(record.version)


def _is_complete(folder: Path, record: VersionRecord) -> bool:
    try:
        return all(hash_file(folder / file.path) == (file.size_bytes, file.sha256) for file in record.files)
    except OSError:
        return False
