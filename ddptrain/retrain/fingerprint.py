"""Looks at the training data of a configuration, and compares them with those of an earlier retraining.

A file is the same if its size and its modification time are the same, or the version that the store gives (ETag).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

from ddptrain.config.plugin_names import BUILT_IN
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.wording import counted, shorten
from ddptrain.driver.transfer.code_package import pack, project_of
from ddptrain.errors import UsageError
from ddptrain.file_ops import sha256
from ddptrain.model_registry.retrainings import RetrainRecord
from ddptrain.protocol.code_digest import content_hash
from ddptrain.storage.sources import fetch_chunks, open_source
from ddptrain.storage.store import BUILTIN, Limits, Location, StoreError
from ddptrain.version import __version__

_LIMITS = Limits(timeout_s=20.0, retries=4, patience_s=40.0)
_MOST_NAMED = 5
_MOST_CLASSES = 2000  # in the record of a retraining
_CODE = (".py", ".pyi", ".ipynb")


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The training data of a configuration. `noun` is for messages.

    digest: SHA-256 over paths, sizes and versions of all files. classes: the folders with files, for images the
    classes, without the name of their source; none if there are many.
    """

    digest: str
    n_files: int
    size_bytes: int
    classes: tuple[str, ...]
    noun: str


def look_at_data(resolved: ResolvedConfig) -> TrainingData:
    """List the training data.

    Raises:
        UsageError: a source does not exist.
        StoreError: a source cannot be listed.
    """
    rows, classes = [], set()
    for source in _sources(resolved):
        for path, (size_bytes, state) in _list_source(source).items():
            rows.append((f"{source.setting}/{path}", size_bytes, state))
            classes.add(str(PurePosixPath(path).parent))
    lines = (f"{size_bytes} {state} {path}\n" for path, size_bytes, state in sorted(rows))
    digest = sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
    known = tuple(sorted(classes)) if len(classes) <= _MOST_CLASSES else ()
    noun = "image" if resolved.config.workload == "images" else "file"
    return TrainingData(digest, len(rows), sum(row[1] for row in rows), known, noun)


def difference(before: RetrainRecord, now: TrainingData) -> list[str]:
    """Describe in words how the data have changed, as "+312 images", "class pug is missing"; empty if they have not."""
    more = now.n_files - before.n_files
    words = [f"{'+' if more > 0 else '-'}{counted(abs(more), now.noun)}"] if more else []
    what = "class" if now.noun == "image" else "folder"
    for names, state in (
        (missing_classes(before.classes, now.classes), "missing"),
        (missing_classes(now.classes, before.classes), "new"),
    ):
        words += [f"{what} {shorten(name)} is {state}" for name in names[:_MOST_NAMED]]
        words += [f"and {len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return words or (["changed"] if before.data != now.digest else [])


def missing_classes(before: Collection[str], now: Collection[str]) -> list[str]:
    """Return the classes that are not there any more; none if one of both is not known."""
    return sorted({*before} - {*now}) if before and now else []


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


def _list_source(source: Location) -> dict[str, tuple[int, str]]:
    """Return path -> size in bytes, and a text that changes with the file. A path or URL may also be one file."""
    is_local, path = source.protocol == "file", Path(source.url)
    if is_local and not path.exists():
        raise UsageError(f"{source.setting} is {source.description}, which does not exist")
    if is_local and path.is_file():
        return {path.name: (path.stat().st_size, f"{path.stat().st_mtime_ns:x}")}
    try:
        files = {
            item.key: (item.size_bytes, item.version.partition("-")[0] if is_local else item.version)
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
    return {PurePosixPath(source.url).name: (size_bytes, digest.hexdigest())}


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
