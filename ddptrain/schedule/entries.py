"""The installed schedules of this user: one JSON file each in the user's state folder."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Self, cast

from ddptrain import file_ops
from ddptrain.config.wording import did_you_mean
from ddptrain.errors import ClusterError, UsageError
from ddptrain.protocol.typed_json import decode_known_fields
from ddptrain.schedule.due_times import Schedule, parse_schedule


@dataclass(frozen=True, slots=True)
class Entry:
    """A schedule: an installed one, or, without model, target and added_at, one that is only to be checked.

    config, workdir, files: absolute paths. target: systemd or cron. added_at: ISO 8601 in UTC. system: whether it is
    a unit of the system. models_dir: the registry, if it is not the one of the configuration.
    """

    name: str
    model: str
    config: str
    workdir: str
    at: str
    zone: str
    target: str
    added_at: str
    jitter_s: int = 0
    files: tuple[str, ...] = ()
    system: bool = False
    models_dir: str = ""

    @property
    def schedule(self) -> Schedule:
        """The times of the schedule."""
        return parse_schedule(self.at, self.zone)

    @property
    def added(self) -> datetime | None:
        """When the schedule was installed; None if it is not installed."""
        return datetime.fromisoformat(self.added_at) if self.added_at else None

    @classmethod
    def from_json(cls, data: bytes, path: Path) -> Self:
        """Read the file; fields of newer versions are ignored. Raises UsageError."""
        try:
            entry = cast(Self, decode_known_fields(cls, json.loads(data)))
            _ = entry.schedule, datetime.fromisoformat(entry.added_at)
        except (ValueError, AttributeError, TypeError, RecursionError, UsageError) as error:
            raise UsageError(f"{path} is damaged ({error}): delete it, and add the schedule again") from None
        return entry


class Entries:
    """The installed schedules. All methods raise ClusterError if the folder can't be read or written."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: None for the user's state folder."""
        from platformdirs import user_state_path

        self.folder = folder or user_state_path("ddptrain", appauthor=False) / "schedules"

    def all(self) -> list[Entry]:
        """Return all schedules, by name. Raises UsageError if a file is damaged."""
        entries, problems = self.readable()
        if problems:
            raise UsageError(problems[0])
        return entries

    def readable(self) -> tuple[list[Entry], list[str]]:
        """Return the schedules whose files are not damaged, by name, and a line for each file that is."""
        entries, problems = [], []
        with self._errors():
            for path in sorted(self.folder.glob("*.json")) if self.folder.is_dir() else []:
                try:
                    entries.append(Entry.from_json(path.read_bytes(), path))
                except UsageError as error:
                    problems.append(str(error))
        return entries, problems

    def find(self, name: str) -> Entry:
        """Return a schedule. Raises UsageError if there is none of this name."""
        known = {entry.name: entry for entry in self.all()}
        if name not in known:
            hint = (
                did_you_mean(name, sorted(known))
                or "none is installed; ddptrain schedule add CONFIG --at TIME --install"
            )
            raise UsageError(f"there is no schedule {name}: {hint}")
        return known[name]

    def save(self, entry: Entry) -> None:
        """Write a schedule, or replace the one of this name."""
        with self._errors():
            self._make_folder()
            data = json.dumps(dataclasses.asdict(entry), indent=1) + "\n"
            file_ops.write_atomic(self._path(entry.name), data.encode(), mode=0o600)

    def delete(self, name: str) -> None:
        """Delete the record of a schedule."""
        with self._errors():
            self._path(name).unlink(missing_ok=True)

    @contextmanager
    def locked(self, purpose: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold a lock for the block; yields False if another process holds it and `wait` is off."""
        with self._errors():
            self._make_folder()
            descriptor = file_ops.open_regular(self.folder / f"{purpose}.lock", file_ops.CREATE)
        try:
            with self._errors():
                held = file_ops.try_lock(descriptor)
                if not held and wait:
                    file_ops.wait_for_lock(descriptor)
                    held = True
            yield held
        finally:
            os.close(descriptor)

    def _make_folder(self) -> None:
        file_ops.make_private(self.folder)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ClusterError(
                f"cannot use the folder {self.folder}: {error.strerror or error}; set XDG_STATE_HOME to another"
            ) from error
