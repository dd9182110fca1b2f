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
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ddptrain.errors import ClusterError, UsageError
from ddptrain.file_ops import hash_file, sha256
from ddptrain.model_registry.model_reader import RECORD, ModelReader, ModelState
from ddptrain.model_registry.own_folder import OwnFolder
from ddptrain.model_registry.records import Change, ModelFile, VersionRecord
from ddptrain.model_registry.reference import CHAMPION, PREVIOUS, check_alias, check_model_name
from ddptrain.results.run_record import utc_now
from ddptrain.storage.object_store import ObjectStore
from ddptrain.storage.store import NoConditionalWrites, Store, WriteConflict

_CLAIM = "claim.json"
_MOST_CONFLICTS = 50
_MOST_REMOVED = 100  # their files are gone long before: each clean-up completes what an earlier one has begun
_ABANDONED_S = 86_400.0  # no version takes as long to write


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of a model that has not been written yet."""

    action: str
    version: int
    aliases: Mapping[str, int]
    alias: str = ""


class ModelRegistry(ModelReader):
    """The models of one place. All methods raise StoreError if the place cannot be read or written."""

    def __init__(self, folder: Store) -> None:
        super().__init__(folder)
        self._keeps_conditions = isinstance(folder, OwnFolder)

    def add_version(self, model: str, sources: Mapping[str, Path | bytes], record: VersionRecord) -> VersionRecord:
        """Write a new version, and return its record with number, time and files.

        sources: the path of each file in the version -> its content, or a local file with it. The same run and step is
        added once: a second call returns the existing version. If the process dies on the way, nothing has been added,
        and prune_versions() deletes what was written a day later.

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

        def edit(state: ModelState) -> Edit | None:
            if others := [each for each in self._same_training(model, record) if each.version != number]:
                created = {change.version for change in self.history(model) if change.action == "created"}
                earlier[:] = [each for each in others if each.version in created]
            return None if earlier else Edit("created", number, state.aliases)

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

        def edit(state: ModelState) -> Edit | None:
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
            return Edit("promoted", number, moved)

        return self.change(model, edit, reason)

    def rollback(self, model: str, reason: str = "") -> Change:
        """Make `previous` the champion, and the champion before it `previous`, in one step.

        A second call goes further back; if there was no earlier champion, `previous` is removed.

        Raises UsageError if there is no previous version; RegistryDamaged if one of its files is damaged.
        """
        verified: int | None = None

        def edit(state: ModelState) -> Edit:
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
            return Edit("rolled back", previous, moved)

        change = self.change(model, edit, reason)
        assert change is not None
        return change

    def reject(self, model: str, number: int, reason: str) -> Change | None:
        """Record that the gate has rejected a version, once."""

        def edit(state: ModelState) -> Edit | None:
            if self.rejections(model).get(number) == reason:
                return None
            return Edit("rejected", number, state.aliases)

        return self.change(model, edit, reason)

    def set_alias(self, model: str, alias: str, number: int | None, reason: str = "") -> Change | None:
        """Point an alias of the user's to a version, or remove it (None). Raises UsageError."""
        check_alias(alias)
        if alias in (CHAMPION, PREVIOUS):
            raise UsageError(f"{alias} is moved by promote and rollback only")
        if number is not None:
            self.version(model, number)

        def edit(state: ModelState) -> Edit | None:
            aliases = dict(state.aliases)
            before = aliases.pop(alias, None)
            if number is not None:
                aliases[alias] = number
            if before == number:
                return None
            action = "alias" if number is not None else "alias removed"
            return Edit(action, number or before or 0, aliases, alias)

        return self.change(model, edit, reason)

    def remove(self, model: str, number: int, reason: str = "") -> Change | None:
        """Delete a version that has no alias. Raises UsageError.

        If the process dies before the end, a second call completes the removal.
        """
        if number not in self.state(model).removed:
            self.version(model, number)

        def edit(state: ModelState) -> Edit | None:
            if number in state.removed:
                return None
            if aliases := state.aliases_of(number):
                raise UsageError(f"version {number} of {model} is {', '.join(aliases)}: move the alias first")
            return Edit("removed", number, state.aliases)

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

    def change(self, model: str, edit: Callable[[ModelState], Edit | None], reason: str = "") -> Change | None:
        """Apply `edit` to the present state; write the result as the next entry of the history, unless it is None.

        edit: is called again with the newer state if another process was faster.
        """
        self._require_conditions()
        for _ in range(_MOST_CONFLICTS):
            state = self.state(model)
            made = edit(state)
            if made is None:
                return None
            if made.version in state.removed:
                raise UsageError(f"model {model} has no version {made.version} any more: it was removed")
            removed = (*state.removed, *([made.version] if made.action == "removed" else []))[-_MOST_REMOVED:]
            number, user, host = state.number + 1, user_name(), socket.gethostname()
            about: dict[str, Any] = {"number": number, "time": utc_now(), "user": user, "host": host, "reason": reason}
            change = Change(**about, **asdict(made), removed=removed)
            try:
                self._below(model, "history").write_versioned(f"{number:06d}.json", change.to_json(), None)
            except WriteConflict:
                continue
            return change
        raise ClusterError(f"model {model} in {self.where} is changed by other processes all the time: try again")

    def _claim_number(self, model: str) -> int:
        """Reserve the next number of a version."""
        self._require_conditions()
        taken = [int(name) for name in self._below(model, "versions").folders() if name.isdecimal()]
        changes = (self._change(model, each) for each in sorted(self._change_numbers(model), reverse=True))
        created = next((change.version for change in changes if change.action == "created"), 0)
        number = max([created, *taken, *self.state(model).removed]) + 1  # a number is never used twice
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
