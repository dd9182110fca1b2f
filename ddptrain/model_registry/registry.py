"""Versions of models in a folder or an object store.

    MODEL/versions/N/version.json       written last: the version exists once this file does
    MODEL/versions/N/...                the files of a run that its model needs, laid out as in a run directory
    MODEL/history/000001.json           every change, with the complete state of aliases after it

A change is one conditional write of the next entry of the history. If two processes change a model together, one
must read the state again. So a change has happened completely or not at all.
"""

from __future__ import annotations

import getpass
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Self

from ddptrain.config.wording import did_you_mean
from ddptrain.errors import ClusterError, UsageError
from ddptrain.file_ops import hash_file, publish, sha256
from ddptrain.model_registry.own_folder import OwnFolder
from ddptrain.model_registry.records import Change, ModelFile, RegistryDamaged, VersionRecord
from ddptrain.model_registry.reference import (
    CHAMPION,
    PREVIOUS,
    ModelReference,
    check_alias,
    check_model_name,
    is_model_name,
)
from ddptrain.results.run_record import utc_now
from ddptrain.storage.object_store import ObjectStore, open_folder
from ddptrain.storage.store import NoConditionalWrites, NotFound, Store, StoreError, WriteConflict, is_url

RECORD = "version.json"
_RECORD_BYTES = 4 << 20
_CLAIM = "claim.json"
_MOST_CONFLICTS = 50
_MOST_REMOVED = 100  # their files are gone long before: each clean-up completes what an earlier one has begun
_ABANDONED_S = 86_400.0  # no version takes as long to write


class ModelRegistry:
    """The models of one place. All methods raise StoreError if the place cannot be read or written."""

    def __init__(self, folder: Store) -> None:
        self.folder = folder
        self._keeps_conditions = isinstance(folder, OwnFolder)

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

    def begun(self) -> list[str]:
        """Return the names of all models, also of those that have no version yet: they are being trained."""
        return [name for name in self.folder.folders() if is_model_name(name)]

    def state(self, model: str) -> Change:
        """Return the last change of a model, which has its present state. Raises RegistryDamaged."""
        check_model_name(model)
        newest = max(self._change_numbers(model), default=0)
        return self._change(model, newest) if newest else Change()

    def history(self, model: str) -> list[Change]:
        """Return every change of a model, oldest first. Raises RegistryDamaged."""
        check_model_name(model)
        names = [f"{number:06d}.json" for number in sorted(self._change_numbers(model))]
        contents = self._below(model, "history").read_all(names)
        return [Change.from_json(data, f"{self.where}/{model}/history/{name}") for name, data in contents.items()]

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

    def verify(self, record: VersionRecord, copy: Path | None = None) -> None:
        """Compare every file of a version, or of a local copy, with its record.

        Raises RegistryDamaged, which names the file.
        """
        folder = OwnFolder(copy) if copy else self._version_folder(record.model, record.version)
        for file in record.files:
            digest, size_bytes, problem = sha256(), 0, ""
            try:
                for chunk in folder.chunks(file.path):
                    digest.update(chunk)
                    size_bytes += len(chunk)
            except NotFound:
                problem = "is missing"
            if not problem and size_bytes != file.size_bytes:
                problem = f"has {size_bytes:,} bytes instead of {file.size_bytes:,}"
            if not problem and digest.hexdigest() != file.sha256:
                problem = "has another SHA-256 than its record"
            if problem:
                where = f"{self.where}/{record.model}/versions/{record.version}/{file.path}"
                raise RegistryDamaged(
                    f"version {record.version} of model {record.model} is damaged: {where} {problem}; "
                    f"use another version (ddptrain models show {record.model})"
                )

    def fetch(self, record: VersionRecord, target: Path) -> None:
        """Copy a version's files into a new folder and verify them. Raises RegistryDamaged, which names the file."""
        folder = self._version_folder(record.model, record.version)
        for file in record.files:
            with suppress(NotFound):  # verify() names it
                folder.fetch(file.path, target / file.path)
        self.verify(record, target)

    def _is_model(self, name: str) -> bool:
        return is_model_name(name) and bool(self._change_numbers(name))

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

    # --- changes ---

    def add_version(self, model: str, sources: Mapping[str, Path | bytes], record: VersionRecord) -> VersionRecord:
        """Write a new version, and return its record with number, time and files.

        sources: the path of each file in the version -> its content, or a local file with it. The same run and step is
        added once: a second call returns the existing version. If the process dies on the way, nothing has been added,
        and the clean-up deletes what was written a day later.

        Raises UsageError if a local file cannot be read.
        """
        check_model_name(model)
        if existing := self._same_training(model, record):
            return existing[0]
        number = self._claim_number(model)
        folder = self._version_folder(model, number)
        files = []
        for path, source in sources.items():
            folder.write(path, source)
            files.append(ModelFile(path, *_hashed(source)))
        complete = replace(record, model=model, version=number, created_at=utc_now(), files=tuple(files))
        self.verify(complete)  # a file may have changed while it was copied
        folder.write(RECORD, complete.to_json())
        earlier: list[VersionRecord] = []

        def edit(state: Change) -> Change | None:
            created = {change.version for change in self.history(model) if change.action == "created"}
            earlier[:] = [each for each in self._same_training(model, record) if each.version in created]
            return None if earlier else replace(state, action="created", version=number)

        self.change(model, edit)
        if earlier:  # another process has added it meanwhile
            self._delete_files(model, number)
            return earlier[0]
        return complete

    def _same_training(self, model: str, record: VersionRecord) -> list[VersionRecord]:
        """Return the versions of the same run and step."""
        same = (record.run_id, record.step)
        return [each for each in self.versions(model) if (each.run_id, each.step) == same]

    def promote(self, model: str, number: int, reason: str = "", expected: int | None = -1) -> Change | None:
        """Make a version the champion; the old champion becomes `previous`. Returns None if it is the champion already.

        expected: the champion that the decision was based on (None: no champion); -1 does not check.

        Raises UsageError if there is no such version, or another process has changed the champion.
        """
        record = self.version(model, number)
        self.verify(record)

        def edit(state: Change) -> Change | None:
            champion = state.version_of(CHAMPION)
            if champion == number:
                return None
            if expected != -1 and champion != expected:
                raise UsageError(
                    f"model {model} was changed meanwhile: its champion is version {champion or 'none'}, not "
                    f"{expected or 'none'}"
                )
            moved = {**state.aliases, CHAMPION: number}
            if champion is not None:
                moved[PREVIOUS] = champion
            return replace(state, action="promoted", version=number, aliases=moved)

        return self.change(model, edit, reason)

    def rollback(self, model: str, reason: str = "") -> Change:
        """Make `previous` the champion, and the champion before it `previous`, in one step.

        A second call goes further back; if there was no earlier champion, `previous` is removed.

        Raises UsageError if there is no previous version; RegistryDamaged if one of its files is damaged.
        """
        verified: int | None = None

        def edit(state: Change) -> Change:
            nonlocal verified
            champion, previous = state.version_of(CHAMPION), state.version_of(PREVIOUS)
            if champion is None or previous is None:
                raise UsageError(
                    f"model {model} has no previous version to go back to; see ddptrain models show {model} --history"
                )
            if verified != previous:
                self.verify(self.version(model, previous))
                verified = previous
            moved = {**state.aliases, CHAMPION: previous}
            del moved[PREVIOUS]
            if left := [each for each in self.champions_before(model, previous) if each not in state.removed]:
                moved[PREVIOUS] = left[-1]
            return replace(state, action="rolled back", version=previous, aliases=moved)

        change = self.change(model, edit, reason)
        assert change is not None
        return change

    def reject(self, model: str, number: int, reason: str) -> Change | None:
        """Record that the gate has rejected a version, once."""

        def edit(state: Change) -> Change | None:
            if self.rejections(model).get(number) == reason:
                return None
            return replace(state, action="rejected", version=number)

        return self.change(model, edit, reason)

    def set_alias(self, model: str, alias: str, number: int | None, reason: str = "") -> Change | None:
        """Point an alias of the user's to a version, or remove it (None). Raises UsageError."""
        check_alias(alias)
        if alias in (CHAMPION, PREVIOUS):
            raise UsageError(f"{alias} is moved by promote and rollback only")
        if number is not None:
            self.version(model, number)

        def edit(state: Change) -> Change | None:
            aliases = dict(state.aliases)
            before = aliases.pop(alias, None)
            if number is not None:
                aliases[alias] = number
            if before == number:
                return None
            action = "alias" if number is not None else "alias removed"
            return replace(state, action=action, version=number or before or 0, aliases=aliases, alias=alias)

        return self.change(model, edit, reason)

    def remove(self, model: str, number: int, reason: str = "") -> Change | None:
        """Delete a version that has no alias. Raises UsageError.

        If the process dies before the end, a second call completes the removal.
        """
        if number not in self.state(model).removed:
            self.version(model, number)

        def edit(state: Change) -> Change | None:
            if number in state.removed:
                return None
            if aliases := state.aliases_of(number):
                raise UsageError(f"version {number} of {model} is {', '.join(aliases)}: move the alias first")
            return replace(state, action="removed", version=number)

        change = self.change(model, edit, reason)
        self._delete_files(model, number)
        return change

    def delete_leftovers(self, model: str) -> list[int]:
        """Delete the files of versions whose deletion, or whose writing a day ago, was interrupted; return these."""
        folders = [int(name) for name in self._below(model, "versions").folders() if name.isdecimal()]
        removed = self.state(model).removed if folders else ()
        complete = {record.version for record in self.versions(model)}
        left = [
            each for each in folders if each in removed or (each not in complete and self._is_abandoned(model, each))
        ]
        for number in left:
            self._delete_files(model, number)
        return sorted(left)

    def _is_abandoned(self, model: str, number: int) -> bool:
        claim = self._version_folder(model, number).read_versioned(_CLAIM)
        return claim is not None and claim.written_s is not None and time.time() - claim.written_s > _ABANDONED_S

    def _delete_files(self, model: str, number: int) -> None:
        folder = self._version_folder(model, number)
        folder.remove(RECORD)  # first: from now on nobody finds the version, however far the rest gets
        if isinstance(folder, OwnFolder):
            folder.delete_temporary_files()
        for path in sorted(folder.files(), key=lambda path: path == _CLAIM):  # last: it marks the folder as incomplete
            folder.remove(path)

    def change(self, model: str, edit: Callable[[Change], Change | None], reason: str = "") -> Change | None:
        """Apply `edit` to the present state; write the result as the next entry of the history, unless it is None.

        edit: is called again with the newer state if another process was faster.
        """
        self._require_conditions()
        for _ in range(_MOST_CONFLICTS):
            state = self.state(model)
            if (made := edit(replace(state, alias=""))) is None:
                return None
            if made.version in state.removed:
                raise UsageError(f"model {model} has no version {made.version} any more: it was removed")
            removed = (*state.removed, *([made.version] if made.action == "removed" else []))[-_MOST_REMOVED:]
            by: dict[str, Any] = {"user": user_name(), "host": socket.gethostname(), "reason": reason}
            change = replace(made, number=state.number + 1, time=utc_now(), removed=removed, **by)
            try:
                self._below(model, "history").write_versioned(f"{change.number:06d}.json", change.to_json(), None)
            except WriteConflict:
                continue
            return change
        raise ClusterError(f"model {model} in {self.where} is changed by other processes all the time: try again")

    def _claim_number(self, model: str) -> int:
        """Reserve the next number of a version."""
        self._require_conditions()
        taken = [int(name) for name in self._below(model, "versions").folders() if name.isdecimal()]
        number = max([0, *taken, *(change.version for change in self.history(model))]) + 1  # none is used twice
        for attempt in range(_MOST_CONFLICTS):
            try:
                claim = f'{{"host": "{socket.gethostname()}", "pid": {os.getpid()}}}\n'.encode()
                self._version_folder(model, number + attempt).write_versioned(_CLAIM, claim, None)
            except WriteConflict:
                continue
            return number + attempt
        raise ClusterError(f"model {model} in {self.where} gets versions from other processes all the time: try again")

    def _require_conditions(self) -> None:
        """Test the store before the first change. Raises UsageError if it ignores the conditions of writes."""
        if self._keeps_conditions:
            return
        try:
            assert isinstance(self.folder, ObjectStore)
            self.folder.test_conditions(f".conditions-{secrets.token_hex(8)}")
        except NoConditionalWrites as error:
            raise UsageError(
                f"cannot change models in {self.where}: the store has no conditional writes ({error}), so two "
                "processes could promote at the same time; use another store, or a folder"
            ) from error
        self._keeps_conditions = True


def open_version(registry: ModelRegistry, record: VersionRecord) -> Path:
    """Return the folder of a version after a comparison of all files with its record.

    A version in an object store is copied into the user's cache once.

    Raises RegistryDamaged, which names the file; StoreError.
    """
    if isinstance(registry.folder, OwnFolder):
        registry.verify(record)
        return Path(registry.folder.folder, record.model, "versions", str(record.version))
    copy = _copy_folder(registry, record)
    if not _is_complete(registry, record, copy):
        incoming = copy.with_name(f".{copy.name}.{secrets.token_hex(4)}.tmp")
        try:
            incoming.mkdir(mode=0o700, parents=True)
            registry.fetch(record, incoming)
            try:
                publish(incoming, copy)
            except OSError:  # there is a copy: a damaged one, or that of another process, which reads it already
                if not _is_complete(registry, record, copy):
                    shutil.rmtree(copy, ignore_errors=True)
                    publish(incoming, copy)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
    return copy


def _copy_folder(registry: ModelRegistry, record: VersionRecord) -> Path:
    from platformdirs import user_cache_path

    slug = re.sub(r"[^A-Za-z0-9]+", "-", registry.where)[-40:].strip("-")
    place = f"{slug}-{sha256(registry.where.encode()).hexdigest()[:8]}"
    return user_cache_path("ddptrain", appauthor=False) / "models" / place / record.model / str(record.version)


def _is_complete(registry: ModelRegistry, record: VersionRecord, copy: Path) -> bool:
    try:
        registry.verify(record, copy)
    except (RegistryDamaged, StoreError):
        return False
    return True


def _hashed(source: Path | bytes) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 of a content, or of a local file."""
    if isinstance(source, bytes):
        return len(source), sha256(source).hexdigest()
    try:
        return hash_file(source)
    except OSError as error:
        raise UsageError(f"cannot read {source}: {error.strerror}") from error


def user_name() -> str:
    """Return the name of this user, for records."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        return f"user id {os.geteuid()}"
