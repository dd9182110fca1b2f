"""Lists the training data of a configuration, and compares the listing with an earlier one.

A file is the same if its size and its modification time are the same, or the version that the store gives (ETag).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any, Self

from ddptrain.config.plugin_names import BUILT_IN, DataSource
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.wording import counted, shorten
from ddptrain.driver.transfer.code_package import pack, project_of
from ddptrain.errors import UsageError
from ddptrain.file_ops import sha256
from ddptrain.protocol.code_digest import content_hash
from ddptrain.redact import hide_credentials
from ddptrain.storage.sources import fetch_chunks, open_source
from ddptrain.storage.store import Limits, Location, StoreError

_LIMITS = Limits(timeout_s=20.0, retries=4, patience_s=40.0)
_MOST_NAMED = 5
_MOST_LISTING_BYTES = 1 << 30
_BUILTIN = "builtin"
_CODE = (".py", ".pyi", ".ipynb")


@dataclass(frozen=True, slots=True)
class DataFile:
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
        whole = sha256()
        for path in sorted(self.files):
            file = self.files[path]
            whole.update(f"{file.size_bytes} {file.version} {path}\n".encode("utf-8", "surrogateescape"))
        return whole.hexdigest()

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files.values())

    @property
    def classes(self) -> set[str]:
        """The folders that contain files; for images the classes."""
        return {str(PurePosixPath(path).parent) for path in self.files}

    def to_bytes(self) -> bytes:
        """Encode the listing, compressed."""
        rows = {path: [file.size_bytes, file.version] for path, file in self.files.items()}
        return zlib.compress(json.dumps({"noun": self.noun, "files": rows}).encode(), 1)

    @classmethod
    def from_bytes(cls, data: bytes | None) -> Self | None:
        """Decode a listing; None for none, or for one that is damaged: then nothing is known about earlier data."""
        try:
            inflater = zlib.decompressobj()
            text = inflater.decompress(data or b"", _MOST_LISTING_BYTES)
            raw = json.loads(text) if inflater.eof else {}
            files = {str(path): DataFile(int(row[0]), str(row[1])) for path, row in raw["files"].items()}
            return cls(files, str(raw["noun"]))
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
        files |= {f"{source.field}/{path}": file for path, file in _list_source(source).items()}
    return DataListing(files, "image" if resolved.config.workload == "images" else "file")


def names_data(resolved: ResolvedConfig) -> bool:
    """Return whether the configuration names training data that can be listed."""
    return bool(_sources(resolved))


@dataclass(frozen=True, slots=True)
class _Source:
    """A source of training data: the field that names it, its path or URL, and the options of its store."""

    field: str
    place: str
    options: Mapping[str, Any]


def _sources(resolved: ResolvedConfig) -> list[_Source]:
    config = resolved.config
    known = BUILT_IN.get(config.workload) if isinstance(config.workload, str) else None
    fields: Sequence[DataSource] = known.data if known else ()
    params: Mapping[str, Any] = config.params
    sources = [
        _Source(f"params.{source.param}", str(params[source.param]), params.get(source.options) or {})
        for source in fields
        if params.get(source.param) not in (None, _BUILTIN)
    ]
    return [*sources, *(_Source(f"data.sources.{n}", place, {}) for n, place in enumerate(config.data.sources))]


def _list_source(source: _Source) -> dict[str, DataFile]:
    """List a source; a path or URL may also be one file."""
    location = Location.of(source.place, source.options, source.field)
    is_local = location.protocol == "file"
    if is_local and not Path(location.url).exists():
        path = "" if source.place == location.url else f" ({location.description})"
        raise UsageError(f"{source.field} is {hide_credentials(source.place)}, which does not exist{path}")
    if is_local and Path(location.url).is_file():
        status = Path(location.url).stat()
        return {Path(location.url).name: DataFile(status.st_size, f"{status.st_mtime_ns:x}")}
    try:
        files = {
            item.key: DataFile(item.size_bytes, item.version.partition("-")[0] if is_local else item.version)
            for item in open_source(location, _LIMITS).listing()
            if "/." not in f"/{item.key}"  # hidden
        }
        refused = None
    except StoreError as error:
        files, refused = {}, error  # a URL of one file, or a store that fails
    if files or is_local:
        if refused is not None:
            raise refused
        return files
    return _of_one_object(source, location, refused)


def _of_one_object(source: _Source, location: Location, refused: StoreError | None) -> dict[str, DataFile]:
    """Hash a URL of one file. A folder that is empty yields no files; one that cannot be listed raises `refused`."""
    digest, size_bytes = sha256(), 0
    try:
        for chunk in fetch_chunks(source.place, source.options, setting=source.field, limits=_LIMITS):
            digest.update(chunk)
            size_bytes += len(chunk)
    except StoreError as error:
        if refused is not None:
            raise refused from error
        return {}
    return {PurePosixPath(location.url).name: DataFile(size_bytes, digest.hexdigest())}


def difference(old: DataListing, new: DataListing) -> list[str]:
    """Describe in words how the data have changed, as "+312 images", "class pug is missing"; empty if they have not."""
    added = new.files.keys() - old.files.keys()
    removed = old.files.keys() - new.files.keys()
    both = new.files.keys() & old.files.keys()
    changed = {path for path in both if new.files[path] != old.files[path]}
    words = [
        f"+{counted(len(added), new.noun)}" if added else "",
        f"-{counted(len(removed), new.noun)}" if removed else "",
        f"{counted(len(changed), new.noun)} changed{_sizes(old, new, changed)}" if changed else "",
    ]
    what = "class" if new.noun == "image" else "folder"
    gone, came = sorted(old.classes - new.classes), sorted(new.classes - old.classes)
    words += [f"{what} {shorten(_class_name(name))} is missing" for name in gone[:_MOST_NAMED]]
    words += [f"{what} {shorten(_class_name(name))} is new" for name in came[:_MOST_NAMED]]
    words += [f"and {len(names) - _MOST_NAMED} more" for names in (gone, came) if len(names) > _MOST_NAMED]
    return [word for word in words if word]


def missing_classes(old: DataListing, new: DataListing) -> list[str]:
    """Return the classes, or folders, that had files and have none any more."""
    return sorted(_class_name(name) for name in old.classes - new.classes)


def _class_name(folder: str) -> str:
    """Return a folder without the name of its source in front, which has no slash."""
    return folder.partition("/")[2] or folder


def _sizes(old: DataListing, new: DataListing, changed: set[str]) -> str:
    if len(changed) > 1:
        return ""
    path = next(iter(changed))
    return f" ({PurePosixPath(path).name}: {old.files[path].size_bytes:,} to {new.files[path].size_bytes:,} bytes)"


def config_digest(resolved: ResolvedConfig) -> str:
    """Digest of what decides the result besides the data: workload, params, evaluation, code, torch and ddptrain."""
    about = {
        "workload": resolved.recorded["workload"],
        "params": resolved.recorded["params"],
        "evaluate": resolved.config.evaluate,
        "code": code_digest(resolved),
        "versions": {name: _version(name) for name in ("torch", "ddptrain")},
    }
    return sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()


def code_digest(resolved: ResolvedConfig) -> str:
    """Digest of the Python files of the user's project; "" for a built-in workload. Raises UsageError."""
    project = project_of(resolved)
    if project is None:
        return ""
    package = pack(project.folder, [Path(resolved.config.results.dir), Path(resolved.config.models.dir)])
    names = [name for name in package.names if name.endswith(_CODE)]
    try:
        return content_hash(project.folder, names)
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
