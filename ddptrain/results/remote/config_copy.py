"""Downloads a configuration file of an object store, as the best.yaml of a sweep."""

from __future__ import annotations

from pathlib import Path

from ddptrain.config.wording import shorten
from ddptrain.errors import UsageError
from ddptrain.file_ops import sha256
from ddptrain.results.errors import naming
from ddptrain.results.secure_files import write_file
from ddptrain.storage.remote_folder import RemoteFolder

_LARGEST_BYTES = 1 << 20


def fetch_config(url: str) -> Path:
    """Return a local copy of the configuration file at a URL such as s3://bucket/runs/ID/best.yaml.

    Raises UsageError if there is no such file; StoreError, ResultsError.
    """
    from platformdirs import user_cache_path

    parent, _, name = url.rpartition("/")
    data = RemoteFolder.open(parent).read(name, _LARGEST_BYTES) if name else None
    if data is None:
        raise UsageError(f"{shorten(url)}: there is no such file")
    folder = user_cache_path("ddptrain", appauthor=False) / "configs" / sha256(url.encode()).hexdigest()[:16]
    with naming(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_file(folder / name, data)
    return folder / name
