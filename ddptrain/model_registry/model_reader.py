"""Reads a model registry: its models, versions, aliases and history."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Self

from ddptrain.config.wording import did_you_mean
from ddptrain.errors import UsageError
from ddptrain.file_ops import hash_file, publish, sha256
from ddptrain.model_registry.own_folder import OwnFolder
from ddptrain.model_registry.records import Change, ModelFile, RegistryDamaged, VersionRecord
from ddptrain.model_registry.reference import CHAMPION, ModelReference, check_model_name
from ddptrain.storage.object_store import open_folder
from ddptrain.storage.store import NotFound, Store, is_url

RECORD = "version.json"
_RECORD_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ModelState:
    """The present state of a model. `number` is that of the last change (0: none yet); `removed`: see Change."""

    model: str
    number: int = 0
    aliases: Mapping[str, int] = field(default_factory=dict)
    removed: tuple[int, ...] = ()

    def version_of(self, alias: str) -> int | None:
        """Return the version that an alias points to."""
        return self.aliases.get(alias)

    def aliases_of(self, version: int) -> list[str]:
        """Return the aliases of a version, in alphabetical order."""
        return sorted(alias for alias, number in self.aliases.items() if number == version)


class ModelReader:
    """The models of one place, for reading. All methods raise StoreError if the place cannot be read."""

    def __init__(self, folder: Store) -> None:
        self.folder = folder

    @classmethod
    def open(cls, place: str) -> Self:
        """Open a folder, or an object store if it is a URL. Raises UsageError."""
        if not is_url(place):
            return cls(OwnFolder(Path(os.path.abspath(os.path.expanduser(place)))))
        folder = open_folder(place)
        folder.check()
        return cls(folder)

    @property
    def where(self) -> str:
        """The folder or URL, for messages."""
        return self.folder.url

    def models(self) -> list[str]:
        """Return the names of all models, in alphabetical order."""
        return [name for name in self.folder.folders() if self._is_model(name)]

    def state(self, model: str) -> ModelState:
        """Return the present state of a model. Raises RegistryDamaged."""
        check_model_name(model)
        newest = max(self._change_numbers(model), default=0)
        if not newest:
            return ModelState(model)
        change = self._change(model, newest)
        return ModelState(model, newest, change.aliases, change.removed)

    def history(self, model: str) -> list[Change]:
        """Return every change of a model, oldest first. Raises RegistryDamaged."""
        check_model_name(model)
        return [self._change(model, number) for number in sorted(self._change_numbers(model))]

    def champions_before(self, model: str, version: int) -> list[int]:
        """Return the champions before `version` became it, oldest first, without those that were rolled back."""
        champions: list[int] = []
        for change in self.history(model):
            champion = change.aliases.get(CHAMPION)
            if champion is None or champions[-1:] == [champion]:
                continue
            if change.action == "rolled back" and champion in champions:
                while champions[-1] != champion:
                    champions.pop()
            else:
                champions.append(champion)
        last = max((at for at, each in enumerate(champions) if each == version), default=0)
        return [each for each in champions[:last] if each != version]

    def rejections(self, model: str) -> dict[int, str]:
        """Return why the gate has rejected a version, for each that was not promoted since."""
        last = {each.version: each for each in self.history(model) if each.action in ("promoted", "rejected")}
        return {version: change.reason for version, change in last.items() if change.action == "rejected"}

    def versions(self, model: str) -> list[VersionRecord]:
        """Return every complete version of a model, oldest first. Raises RegistryDamaged."""
        check_model_name(model)
        numbers = sorted(int(name) for name in self._below(model, "versions").folders() if name.isdecimal())
        found = self._below(model, "versions").read_all([f"{number}/{RECORD}" for number in numbers])
        return [self._parsed(model, int(PurePosixPath(path).parts[0]), data) for path, data in found.items()]

    def version(self, model: str, number: int) -> VersionRecord:
        """Return one version. Raises UsageError if it does not exist; RegistryDamaged."""
        data = self._version_folder(model, number).read(RECORD, _RECORD_BYTES)
        if data is None:
            existing = ", ".join(str(version.version) for version in self.versions(model))
            raise UsageError(f"model {model} has no version {number}; it has {existing or 'none'}")
        return self._parsed(model, number, data)

    def resolve(self, reference: ModelReference) -> VersionRecord:
        """Return the version that a reference names. Raises UsageError if there is none; RegistryDamaged."""
        state = self.state(reference.model)
        if not state.number:
            known = self.models()
            hint = did_you_mean(reference.model, known) or "ddptrain models promote MODEL RUN makes the first version"
            raise UsageError(
                f"there is no model {reference.model} in {self.where}: {hint}; --models-dir names another place"
            )
        if reference.version is not None:
            return self.version(reference.model, reference.version)
        number = state.version_of(reference.alias)
        if number is None:
            aliases = sorted(state.aliases)
            hint = did_you_mean(reference.alias, aliases) or "it has no aliases yet"
            raise UsageError(f"model {reference.model} has no alias {reference.alias}: {hint}")
        return self.version(reference.model, number)

    def verify(self, record: VersionRecord) -> None:
        """Compare every file of a version with its record. Raises RegistryDamaged, which names the file."""
        folder = self._version_folder(record.model, record.version)
        for file in record.files:
            digest, size_bytes = sha256(), 0
            try:
                for chunk in folder.chunks(file.path):
                    digest.update(chunk)
                    size_bytes += len(chunk)
            except NotFound:
                raise self._damaged(record, file, "is missing") from None
            self._check(record, file, size_bytes, digest.hexdigest())

    def fetch(self, record: VersionRecord, target: Path) -> None:
        """Copy a version's files into a new folder and verify them. Raises RegistryDamaged, which names the file."""
        folder = self._version_folder(record.model, record.version)
        for file in record.files:
            path = target / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                folder.fetch(file.path, path)
            except NotFound:
                raise self._damaged(record, file, "is missing") from None
            self._check(record, file, *hash_file(path))

    def _is_model(self, name: str) -> bool:
        try:
            check_model_name(name)
        except UsageError:
            return False
        return bool(self._change_numbers(name))

    def _change_numbers(self, model: str) -> list[int]:
        names = [PurePosixPath(path) for path in self._below(model, "history").files()]
        return [int(name.stem) for name in names if name.suffix == ".json" and name.stem.isdecimal()]

    def _change(self, model: str, number: int) -> Change:
        name = f"{number:06d}.json"
        data = self._below(model, "history").read(name, _RECORD_BYTES)
        where = f"{self.where}/{model}/history/{name}"
        if data is None:
            raise RegistryDamaged(f"{where} is missing")
        return Change.from_json(data, where)

    def _parsed(self, model: str, number: int, data: bytes) -> VersionRecord:
        where = f"{self.where}/{model}/versions/{number}/{RECORD}"
        record = VersionRecord.from_json(data, where)
        if (record.model, record.version) != (model, number):
            raise RegistryDamaged(f"{where} is damaged: it is of {record.model}, version {record.version}")
        return record

    def _below(self, model: str, name: str) -> Store:
        return self.folder.below(model).below(name)

    def _version_folder(self, model: str, number: int) -> Store:
        return self._below(model, "versions").below(str(number))

    def _check(self, record: VersionRecord, file: ModelFile, size_bytes: int, digest: str) -> None:
        if size_bytes != file.size_bytes:
            raise self._damaged(record, file, f"has {size_bytes:,} bytes instead of {file.size_bytes:,}")
        if digest != file.sha256:
            raise self._damaged(record, file, "has another SHA-256 than its record")

    def _damaged(self, record: VersionRecord, file: ModelFile, what: str) -> RegistryDamaged:
        where = f"{self.where}/{record.model}/versions/{record.version}/{file.path}"
        return RegistryDamaged(
            f"version {record.version} of model {record.model} is damaged: {where} {what}; "
            f"use another version (ddptrain models show {record.model})"
        )


def open_version(registry: ModelReader, record: VersionRecord) -> Path:
    """Return the folder of a version after a comparison of all files with its record.

    A version in an object store is copied into the user's cache once.

    Raises RegistryDamaged, which names the file; StoreError.
    """
    if isinstance(registry.folder, OwnFolder):
        registry.verify(record)
        return Path(registry.folder.folder, record.model, "versions", str(record.version))
    copy = _copy_folder(registry, record)
    if not _is_complete(copy, record):
        incoming = copy.with_name(f".{copy.name}.{secrets.token_hex(4)}.tmp")
        try:
            incoming.mkdir(mode=0o700, parents=True)
            registry.fetch(record, incoming)
            try:
                publish(incoming, copy)
            except OSError:  # there is a copy: a damaged one, or that of another process, which reads it already
                if not _is_complete(copy, record):
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
