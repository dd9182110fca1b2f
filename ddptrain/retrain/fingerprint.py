"""Lists the training data of a configuration, and compares the listing with an earlier one.

A file is the same if its size and its modification time are the same, or the version that the store gives (ETag).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Self

from ddptrain.config.plugin_names import BUILT_IN
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.wording import counted, shorten
from ddptrain.driver.transfer.code_package import pack, project_of
from ddptrain.errors import UsageError
from ddptrain.file_ops import sha256
from ddptrain.protocol.code_digest import content_hash
from ddptrain.storage.sources import fetch_chunks, open_source
from ddptrain.storage.store import BUILTIN, Limits, Location, StoreError
from ddptrain.version import __version__

_LIMITS = Limits(timeout_s=20.0, retries=4, patience_s=40.0)
_MOST_NAMED = 5
_CODE = (".py", ".pyi", ".ipynb")


class DataFile(NamedTuple):
    """A file of the training data. version: a text that changes if the file changes."""

    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class DataListing:
    """The training data: path -> file, where a path begins with the name of its source. `noun` is for messages."""

    files: Mapping[str, DataFile] = field(default_factory=dict)
    noun: str = "file"

    @property
    def digest(self) -> str:
        """SHA-256 over paths, sizes and versions."""
        lines = (f"{file.size_bytes} {file.version} {path}\n" for path, file in sorted(self.files.items()))
        return sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files.values())

    @property
    def classes(self) -> set[str]:
        """The folders that contain files, with their source; for images the classes."""
        return {str(PurePosixPath(path).parent) for path in self.files}

    def to_bytes(self) -> bytes:
        """Encode the listing, compressed."""
        return zlib.compress(json.dumps({"noun": self.noun, "files": self.files}).encode(), 1)

    @classmethod
    def from_bytes(cls, data: bytes | None) -> Self | None:
        """Decode a listing; None for none, or for one that is damaged: then nothing is known about earlier data."""
        try:
            raw = json.loads(zlib.decompress(data or b""))
            return cls({str(path): DataFile(*file) for path, file in raw["files"].items()}, str(raw["noun"]))
        except (zlib.error, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None


def list_data(resolved: ResolvedConfig) -> DataListing:
    """List the training data of a configuration.

    Raises:
        UsageError: a source does not exist.
        StoreError: a source cannot be listed.
    """
    files: dict[str, DataFile] = {}
    for source in _sources(resolved):
        files |= {f"{source.setting}/{path}": file for path, file in _list_source(source).items()}
    return DataListing(files, "image" if resolved.config.workload == "images" else "file")


def names_data(resolved: ResolvedConfig) -> bool:
    """Return whether the configuration names training data that can be listed."""
    return bool(_sources(resolved))


def _sources(resolved: ResolvedConfig) -> list[Location]:
    """Return the sources of the training data; the `setting` of each is the field that names it."""
    config = resolved.config
    built_in = BUILT_IN.get(config.workload) if isinstance(config.workload, str) else None
    params: Mapping[str, Any] = config.params
    sources = [
        Location.of(str(params[source.param]), params.get(source.options) or {}, f"params.{source.param}")
        for source in (built_in.data if built_in else ())
        if params.get(source.param) not in (None, BUILTIN)
    ]
    return [*sources, *(Location.of(place, {}, f"data.sources.{n}") for n, place in enumerate(config.data.sources))]


def _list_source(source: Location) -> dict[str, DataFile]:
    """List a source; a path or URL may also be one file."""
    is_local, path = source.protocol == "file", Path(source.url)
    if is_local and not path.exists():
        raise UsageError(f"{source.setting} is {source.description}, which does not exist")
    if is_local and path.is_file():
        return {path.name: DataFile(path.stat().st_size, f"{path.stat().st_mtime_ns:x}")}
    try:
        files = {
            item.key: DataFile(item.size_bytes, item.version.partition("-")[0] if is_local else item.version)
            for item in open_source(source, _LIMITS).listing()
            if "/." not in f"/{item.key}"  # hidden
        }
        if files or is_local:
            return files
        refused = None
    except StoreError as error:
        if is_local:
            raise
        refused = error
    # It is a URL of one file, whose content counts; or an empty folder, or a store that fails.
    digest, size_bytes = sha256(), 0
    try:
        for chunk in fetch_chunks(source.url, source.options, setting=source.setting, limits=_LIMITS):
            digest.update(chunk)
            size_bytes += len(chunk)
    except StoreError as error:
        if refused is not None:
            raise refused from error
        return {}
    return {PurePosixPath(source.url).name: DataFile(size_bytes, digest.hexdigest())}


def difference(old: DataListing, new: DataListing) -> list[str]:
    """Describe in words how the data have changed, as "+312 images", "class pug is missing"; empty if they have not."""
    added, removed = new.files.keys() - old.files.keys(), old.files.keys() - new.files.keys()
    changed = [path for path in new.files.keys() & old.files.keys() if new.files[path] != old.files[path]]
    counts = {"+{}": len(added), "-{}": len(removed), "{} changed": len(changed)}
    words = [form.format(counted(count, new.noun)) for form, count in counts.items() if count]
    what = "class" if new.noun == "image" else "folder"
    for names, state in ((missing_classes(old, new), "missing"), (missing_classes(new, old), "new")):
        words += [f"{what} {shorten(name)} is {state}" for name in names[:_MOST_NAMED]]
        words += [f"and {len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return words


def missing_classes(old: DataListing, new: DataListing) -> list[str]:
    """Return the classes, or folders, that had files and have none any more, without the name of the source."""
    return sorted(name.partition("/")[2] or name for name in old.classes - new.classes)


def config_digest(resolved: ResolvedConfig) -> str:
    """Digest of what decides the result besides the data: workload, params, evaluation, code, torch and ddptrain."""
    about = {
        "workload": resolved.recorded["workload"],
        "params": resolved.recorded["params"],
        "evaluate": resolved.config.evaluate,
        "code": code_digest(resolved),
        "versions": {"torch": _torch_version(), "ddptrain": __version__},
    }
    return sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


def code_digest(resolved: ResolvedConfig) -> str:
    """Digest of the Python files of the user's project; "" for a built-in workload. Raises UsageError."""
    project = project_of(resolved)
    if project is None:
        return ""
    package = pack(project.folder, [Path(resolved.config.results.dir), Path(resolved.config.models.dir)])
    try:
        return content_hash(project.folder, [name for name in package.names if name.endswith(_CODE)])
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
