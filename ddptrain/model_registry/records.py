"""What the registry stores as JSON: a version of a model, and a change of its aliases."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self, cast

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from ddptrain.config.wording import shorten
from ddptrain.errors import DdptrainError, ExitCode
from ddptrain.results.run_record import as_json_data

SCHEMA = 1
_DEEPEST_PATH = 6
# Records have null for a number that is not finite, because JSON has none.
Numbers = Mapping[str, Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]]


class RegistryDamaged(DdptrainError):
    """A file of the registry is missing, or is not what its record says."""

    exit_code = ExitCode.CLUSTER


def _inside(path: str) -> str:
    parts = path.split("/")
    if {"", ".", ".."} & set(parts) or "\\" in path or not path.isprintable() or len(parts) > _DEEPEST_PATH:
        raise ValueError(f"the path {path!r} leads out of the version's folder")
    return path


class JsonRecord:
    """A dataclass that is stored as a JSON file."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return cast(dict[str, Any], as_json_data(dataclasses.asdict(cast(Any, self))))

    def to_json(self) -> bytes:
        """Return the content of its file."""
        return (json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, name: str) -> Self:
        """Read the file `name`; fields of newer versions are ignored. Raises RegistryDamaged."""
        try:
            return cast(Self, _adapter(cast(Any, cls)).validate_json(data, strict=True))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            reason = "it is not JSON" if first["type"] == "json_invalid" else f"{where}: {first['msg']}"
            raise RegistryDamaged(f"{name} is damaged: {shorten(reason.removeprefix(': '))}") from None


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a version: its path below the version's folder, size and SHA-256."""

    path: Annotated[str, AfterValidator(_inside)]
    size_bytes: _Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True)
class VersionRecord(JsonRecord):
    """version.json. The version exists once this file does: it is written last.

    parent: the champion at the time of training, None for the first version. metrics: those of the checkpoint.
    Of a version that `ddptrain retrain` has made: the digests of its training data, of its held-out data and of its
    configuration, and the metrics of its evaluation.
    """

    model: str
    version: _Count
    created_at: str
    run_id: str
    workload: str
    step: _Count
    metrics: Numbers
    files: tuple[ModelFile, ...]
    epoch: float | None = None
    parent: _Count | None = None
    code: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    data: str = ""
    held_out: str = ""
    config: str = ""
    evaluation: Numbers = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    @classmethod
    def from_json(cls, data: bytes, name: str) -> Self:
        """Read version.json. `name` is the file's, for the message. Raises RegistryDamaged."""
        record = super(VersionRecord, cls).from_json(data, name)
        paths = [file.path for file in record.files]
        if not paths or len(set(paths)) < len(paths):
            raise RegistryDamaged(f"{name} is damaged: it lists no files, or one twice")
        return record


@dataclass(frozen=True, slots=True)
class Change(JsonRecord):
    """An entry of the history: what was done, and the complete state after it. The newest entry is the present state.

    number: from 1; 0 is the state of a model without a history.
    action: created, promoted, rejected, rolled back, alias, alias removed, removed. reason: the text
    of the user or the gate.
    aliases: alias -> version number. removed: the latest versions that were deleted, or are being deleted.
    """

    number: _Count = 0
    time: str = ""
    action: str = ""
    version: _Count = 0
    user: str = ""
    host: str = ""
    aliases: Mapping[str, _Count] = field(default_factory=dict)
    alias: str = ""
    reason: str = ""
    removed: tuple[_Count, ...] = ()
    schema: int = SCHEMA

    def version_of(self, alias: str) -> int | None:
        """Return the version that an alias points to after this change."""
        return self.aliases.get(alias)

    def aliases_of(self, version: int) -> list[str]:
        """Return the aliases of a version after this change, in alphabetical order."""
        return sorted(alias for alias, number in self.aliases.items() if number == version)
