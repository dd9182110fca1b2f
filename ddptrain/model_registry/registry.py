"""Versions of models in a folder or an object store.

    MODEL/versions/N/version.json       written last: the version exists once this file does
    MODEL/versions/N/...                the files of a run that its model needs, laid out as in a run directory
    MODEL/history/000001.json           every change, with the complete state of aliases and pins after it

A change is one conditional write of the next entry of the history. If two processes change a model together, one
must read the state again. So a change has happened completely or not at all.
"""

from __future__ import annotations

import getpass
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from ddptrain.config.wording import did_you_mean
from ddptrain.errors import ClusterError, UsageError
from ddptrain.file_ops import hash_file, sha256
from ddptrain.model_registry.own_folder import OwnFolder
from ddptrain.model_registry.records import Change, ModelFile, RegistryDamaged, VersionRecord
from ddptrain.model_registry.reference import CHAMPION, PREVIOUS, ModelReference, check_alias, check_model_name
from ddptrain.storage.remote_folder import RemoteFolder, is_url
from ddptrain.storage.store import NoConditionalWrites, NotFound, WriteConflict

RECORD = "version.json"
_CLAIM = "claim.json"
_RECORD_BYTES = 4 << 20
_MOST_CONFLICTS = 50


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model as it stands: its aliases and pinned versions, and the number of the last change (0: none yet)."""

    model: str
    number: int = 0
    aliases: Mapping[str, int] | None = None
    pinned: tuple[int, ...] = ()

    def version_of(self, alias: str) -> int | None:
        """Return the version that an alias points to."""
        return (self.aliases or {}).get(alias)

    def aliases_of(self, version: int) -> list[str]:
        """Return the aliases of a version, in alphabetical order."""
        return sorted(alias for alias, number in (self.aliases or {}).items() if number == version)


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of a model that has not been written yet."""

    action: str
    version: int
    aliases: Mapping[str, int]
    pinned: tuple[int, ...]
    alias: str = ""


class ModelRegistry:
    """The models of one place. All methods raise StoreError if the place cannot be read or written."""

    def __init__(self, folder: RemoteFolder) -> None:
        self.folder = folder
        self._keeps_conditions = isinstance(folder.store, OwnFolder)

    @classmethod
    def open(cls, place: str) -> ModelRegistry:
        """Open a folder, or an object store if it is a URL. Raises UsageError."""
        if not is_url(place):
            return cls(RemoteFolder(OwnFolder(Path(os.path.abspath(os.path.expanduser(place))))))
        folder = RemoteFolder.open(place)
        folder.check()
        return cls(folder)

    @property
    def where(self) -> str:
        """The folder or URL, for messages."""
        return self.folder.url

    # --- Reading ---

    def models(self) -> list[str]:
        """Return the names of all models, in alphabetical order."""
        return [name for name in self.folder.folders() if self._is_model(name)]

    def state(self, model: str) -> ModelState:
        """Return the present state of a model. Raises RegistryDamaged."""
        check_model_name(model)
        newest = max(self._change_numbers(model), default=0)
        if not newest:
            return ModelState(model, aliases={})
        change = self._change(model, newest)
        return ModelState(model, newest, change.aliases, change.pinned)

    def history(self, model: str) -> list[Change]:
        """Return every change of a model, oldest first. Raises RegistryDamaged."""
        check_model_name(model)
        return [self._change(model, number) for number in sorted(self._change_numbers(model))]

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
            aliases = sorted(state.aliases or ())
            hint = did_you_mean(reference.alias, aliases) or "it has no aliases yet"
            raise UsageError(f"model {reference.model} has no alias {reference.alias}: {hint}")
        return self.version(reference.model, number)

    def verify(self, record: VersionRecord) -> None:
        """Compare every file of a version with its record. Raises RegistryDamaged, which names the file."""
        for file in record.files:
            digest, size_bytes = sha256(), 0
            try:
                for chunk in self._chunks(record, file):
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

    def local_folder(self, record: VersionRecord) -> Path | None:
        """Return the version's folder if the registry is on this machine."""
        store = self.folder.store
        if not isinstance(store, OwnFolder):
            return None
        return Path(store.location.url, record.model, "versions", str(record.version))

    # --- Changes ---

    def add_version(self, model: str, sources: Mapping[str, Path | bytes], record: VersionRecord) -> VersionRecord:
        """Write a new version, and return its record with number, time and files.

        sources: the path of each file in the version -> its content, or a local file with it. The same run and step is
        added once: a second call returns the existing version. If the process dies on the way, nothing has been added.

        Raises UsageError if a local file cannot be read.
        """
        check_model_name(model)
        for existing in self.versions(model):
            if (existing.run_id, existing.step) == (record.run_id, record.step):
                return existing
        number = self._claim_number(model)
        folder = self._version_folder(model, number)
        files = []
        for path, source in sources.items():
            folder.write(path, source)
            files.append(ModelFile(path, *_hashed(source)))
        complete = replace(record, model=model, version=number, created_at=_now(), files=tuple(files))
        self.verify(complete)  # a file may have changed while it was copied
        folder.write(RECORD, complete.to_json())
        self.change(model, lambda state: Edit("created", number, dict(state.aliases or {}), state.pinned))
        return complete

    def promote(self, model: str, number: int, reason: str = "", expected: int | None = -1) -> Change | None:
        """Make a version the champion; the old champion becomes `previous`. Returns None if it is the champion already.

        expected: the champion that the decision was based on (None: no champion); -1 does not check.

        Raises UsageError if there is no such version, or another process has changed the champion.
        """
        record = self.version(model, number)
        self.verify(record)

        def edit(state: ModelState) -> Edit | None:
            champion = state.version_of(CHAMPION)
            if champion == number:
                return None
            if expected != -1 and champion != expected:
                raise UsageError(
                    f"model {model} was changed meanwhile: its champion is version {champion or 'none'}, not "
                    f"{expected or 'none'}"
                )
            moved = {**(state.aliases or {}), CHAMPION: number}
            if champion is not None:
                moved[PREVIOUS] = champion
            return Edit("promoted", number, moved, state.pinned)

        return self.change(model, edit, reason)

    def rollback(self, model: str, reason: str = "") -> Change:
        """Make `previous` the champion, and the champion `previous`, in one step.

        Raises UsageError if there is no previous version; RegistryDamaged if one of its files is damaged.
        """
        verified: int | None = None

        def edit(state: ModelState) -> Edit:
            nonlocal verified
            champion, previous = state.version_of(CHAMPION), state.version_of(PREVIOUS)
            if champion is None or previous is None:
                raise UsageError(
                    f"model {model} has no previous version to go back to; see ddptrain models history {model}"
                )
            if verified != previous:
                self.verify(self.version(model, previous))
                verified = previous
            moved = {**(state.aliases or {}), CHAMPION: previous, PREVIOUS: champion}
            return Edit("rolled back", previous, moved, state.pinned)

        change = self.change(model, edit, reason)
        assert change is not None
        return change

    def set_alias(self, model: str, alias: str, number: int | None, reason: str = "") -> Change | None:
        """Point an alias of the user's to a version, or remove it (None). Raises UsageError."""
        check_alias(alias)
        if alias in (CHAMPION, PREVIOUS):
            raise UsageError(f"{alias} is moved by promote and rollback only")
        if number is not None:
            self.version(model, number)

        def edit(state: ModelState) -> Edit | None:
            aliases = dict(state.aliases or {})
            before = aliases.pop(alias, None)
            if number is not None:
                aliases[alias] = number
            if before == number:
                return None
            action = "alias" if number is not None else "alias removed"
            return Edit(action, number or before or 0, aliases, state.pinned, alias)

        return self.change(model, edit, reason)

    def pin(self, model: str, number: int, *, pinned: bool, reason: str = "") -> Change | None:
        """Protect a version from being removed, or end this protection. Raises UsageError."""
        self.version(model, number)

        def edit(state: ModelState) -> Edit | None:
            others = tuple(each for each in state.pinned if each != number)
            if pinned == (number in state.pinned):
                return None
            action = "pinned" if pinned else "unpinned"
            return Edit(action, number, dict(state.aliases or {}), (*others, number) if pinned else others)

        return self.change(model, edit, reason)

    def remove(self, model: str, number: int, reason: str = "") -> Change | None:
        """Delete a version that is neither pinned nor has an alias. Raises UsageError."""
        record = self.version(model, number)

        def edit(state: ModelState) -> Edit:
            if aliases := state.aliases_of(number):
                raise UsageError(f"version {number} of {model} is {', '.join(aliases)}: move the alias first")
            if number in state.pinned:
                raise UsageError(f"version {number} of {model} is pinned: unpin it first")
            return Edit("removed", number, dict(state.aliases or {}), state.pinned)

        change = self.change(model, edit, reason)
        folder = self._version_folder(model, number)
        folder.remove(RECORD)  # first: from now on nobody finds the version, however far the rest gets
        for file in record.files:
            folder.remove(file.path)
        folder.remove(_CLAIM)
        return change

    def change(self, model: str, edit: Callable[[ModelState], Edit | None], reason: str = "") -> Change | None:
        """Write the next entry of the history: what `edit` makes of the present state; nothing if it returns None.

        edit: is called again with the newer state if another process was faster.
        """
        self._require_conditions()
        for _ in range(_MOST_CONFLICTS):
            state = self.state(model)
            made = edit(state)
            if made is None:
                return None
            number = state.number + 1
            change = Change(
                number=number,
                time=_now(),
                action=made.action,
                version=made.version,
                user=_user(),
                host=socket.gethostname(),
                aliases=made.aliases,
                pinned=made.pinned,
                alias=made.alias,
                reason=reason,
            )
            try:
                self._below(model, "history").write_versioned(f"{number:06d}.json", change.to_json(), None)
            except WriteConflict:
                continue
            return change
        raise ClusterError(f"model {model} in {self.where} is changed by other processes all the time: try again")

    # --- Helpers ---

    def _claim_number(self, model: str) -> int:
        """Reserve the next number of a version."""
        self._require_conditions()
        taken = [int(name) for name in self._below(model, "versions").folders() if name.isdecimal()]
        removed = [change.version for change in self.history(model)]  # a number is never used twice
        number = max([0, *taken, *removed]) + 1
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
            self.folder.test_conditions(f".conditions-{secrets.token_hex(8)}")
        except NoConditionalWrites as error:
            raise UsageError(
                f"cannot change models in {self.where}: the store has no conditional writes ({error}), so two "
                "processes could promote at the same time; use another store, or a folder"
            ) from error
        self._keeps_conditions = True

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

    def _below(self, model: str, name: str) -> RemoteFolder:
        return self.folder.below(model).below(name)

    def _version_folder(self, model: str, number: int) -> RemoteFolder:
        return self._below(model, "versions").below(str(number))

    def _chunks(self, record: VersionRecord, file: ModelFile) -> Iterator[bytes]:
        folder = self._version_folder(record.model, record.version)
        return folder.store.chunks(f"{folder.path}/{file.path}")

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


def _hashed(source: Path | bytes) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 of a content, or of a local file."""
    if isinstance(source, bytes):
        return len(source), sha256(source).hexdigest()
    try:
        return hash_file(source)
    except OSError as error:
        raise UsageError(f"cannot read {source}: {error.strerror}") from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        return f"user id {os.geteuid()}"
