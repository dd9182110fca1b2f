"""What the registry stores as JSON: a version of a model, and a change of its aliases."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Self, cast

from ddptrain.config.wording import shorten
from ddptrain.errors import DdptrainError, ExitCode
from ddptrain.results.run_record import as_json_data

SCHEMA = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DEEPEST_PATH = 6


class RegistryDamaged(DdptrainError):
    """A file of the registry is missing, or is not what its record says."""

    exit_code = ExitCode.CLUSTER


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a version: its path below the version's folder, size and SHA-256."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """version.json. The version exists once this file does: it is written last.

    parent: the champion at the time of training, None for the first version. metrics: those of the checkpoint.
    """

    model: str
    version: int
    created_at: str
    run_id: str
    workload: str
    step: int
    metrics: Mapping[str, float]
    files: tuple[ModelFile, ...]
    epoch: float | None = None
    parent: int | None = None
    code: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON data."""
        return cast(dict[str, Any], as_json_data(dataclasses.asdict(self)))

    def to_json(self) -> bytes:
        """The content of version.json."""
        return _encoded(self.as_dict())

    @classmethod
    def from_json(cls, data: bytes, name: str) -> Self:
        """Read version.json. `name` is the file's, for the message. Raises RegistryDamaged."""
        raw = _object(data, name)
        try:
            files = tuple(_file(each) for each in raw["files"])
            paths = [file.path for file in files]
            if not files or len(set(paths)) < len(paths):
                raise ValueError("it lists no files, or one twice")
            return cls(
                model=_text(raw["model"]),
                version=_count(raw["version"]),
                created_at=_text(raw["created_at"]),
                run_id=_text(raw["run_id"]),
                workload=_text(raw["workload"]),
                step=_count(raw["step"]),
                metrics={_text(key): float(value) for key, value in raw["metrics"].items() if value is not None},
                files=files,
                epoch=None if raw.get("epoch") is None else float(raw["epoch"]),
                parent=None if raw.get("parent") is None else _count(raw["parent"]),
                code=_text(raw.get("code", "")),
                versions={_text(key): _text(value) for key, value in raw.get("versions", {}).items()},
                schema=_count(raw["schema"]),
            )
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise RegistryDamaged(f"{name} is damaged: {type(error).__name__}: {shorten(str(error))}") from None


@dataclass(frozen=True, slots=True)
class Change:
    """An entry of the history: what was done, and the complete state after it. The newest entry is the present state.

    action: created, promoted, rolled back, alias, alias removed, pinned, unpinned, removed. reason: the user's text.
    aliases: alias -> version number.
    """

    number: int
    time: str
    action: str
    version: int
    user: str
    host: str
    aliases: Mapping[str, int]
    pinned: tuple[int, ...]
    alias: str = ""
    reason: str = ""
    schema: int = SCHEMA

    def as_dict(self) -> dict[str, Any]:
        """The entry as JSON data."""
        return cast(dict[str, Any], as_json_data(dataclasses.asdict(self)))

    def to_json(self) -> bytes:
        """The content of the entry's file."""
        return _encoded(self.as_dict())

    @classmethod
    def from_json(cls, data: bytes, name: str) -> Self:
        """Read an entry. Raises RegistryDamaged."""
        raw = _object(data, name)
        try:
            return cls(
                number=_count(raw["number"]),
                time=_text(raw["time"]),
                action=_text(raw["action"]),
                version=_count(raw["version"]),
                user=_text(raw["user"]),
                host=_text(raw["host"]),
                aliases={_text(alias): _count(version) for alias, version in raw["aliases"].items()},
                pinned=tuple(_count(version) for version in raw["pinned"]),
                alias=_text(raw.get("alias", "")),
                reason=_text(raw.get("reason", "")),
                schema=_count(raw["schema"]),
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RegistryDamaged(f"{name} is damaged: {type(error).__name__}: {shorten(str(error))}") from None


def _encoded(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, indent=1, allow_nan=False) + "\n").encode()


def _object(data: bytes, name: str) -> dict[str, Any]:
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        raise RegistryDamaged(f"{name} is damaged: it is not JSON") from None
    if not isinstance(raw, dict):
        raise RegistryDamaged(f"{name} is damaged: it is no JSON object")
    return raw


def _file(raw: Any) -> ModelFile:
    file = ModelFile(_text(raw["path"]), _count(raw["size_bytes"]), _text(raw["sha256"]))
    parts = PurePosixPath(file.path).parts
    is_inside = parts and not file.path.startswith("/") and not {"..", "."} & set(file.path.split("/"))
    if not is_inside or "\\" in file.path or not file.path.isprintable() or len(parts) > _DEEPEST_PATH:
        raise ValueError(f"the path {file.path!r} leads out of the version's folder")
    if not _SHA256.fullmatch(file.sha256):
        raise ValueError(f"{file.path} has no SHA-256")
    return file


def _text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise TypeError(f"{raw!r} is no text")
    return raw


def _count(raw: Any) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or raw < 0:
        raise TypeError(f"{raw!r} is no number of 0 or more")
    return raw
