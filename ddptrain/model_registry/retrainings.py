"""What a retraining has done so far, as JSON beside the versions of its model; a later start continues from it.

MODEL/retrainings/000001.json      one retraining, from its start to its end; rewritten after each stage
MODEL/retrainings/000001.listing   the listing of its training data (see fingerprint.py)
MODEL/retrainings/run.lock         the lock of the process that retrains the model (see ownership.py)
MODEL/retrainings/late             when users were last notified that the model is late
MODEL/skipped/TIME-TOKEN.json      a start that did nothing, or that a later start has continued, and why
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, Self, cast

from ddptrain.model_registry.own_folder import OwnFolder
from ddptrain.model_registry.records import Numbers, RegistryDamaged, decoded
from ddptrain.results.layout import valid_run_id
from ddptrain.results.run_record import as_json_data, utc_now
from ddptrain.storage.store import Store, Versioned

SCHEMA = 1
_RECORD_BYTES = 4 << 20
_KEPT_SKIPS = 100
_KEPT_LISTINGS = 50
_KEPT_RECORDS = 200  # more than any reader looks at
_LATE = "late"


class Stage(StrEnum):
    """The stages of a retraining, in their order; the first one stands for none."""

    NONE = ""
    LOCK = "lock"
    CHECK_DATA = "check data"
    TRAIN = "train"
    EVALUATE = "evaluate"
    GATE = "gate"
    PROMOTE = "promote"
    NOTIFY = "notify"
    CLEAN_UP = "clean up"


class RetrainStatus(StrEnum):
    """The state of a retraining. All except `running` are final, but a later start continues the resumable ones."""

    RUNNING = "running"
    PROMOTED = "promoted"  # a new champion
    UNCHANGED = "unchanged"  # nothing to do
    SKIPPED = "skipped"  # another process retrains the model, or the slot is done
    REJECTED = "rejected"  # trained, but the gate refused it
    FAILED = "failed"
    DEADLINE = "deadline"  # out of time; saved
    INTERRUPTED = "interrupted"  # a signal, preemption, or `overlap: replace`; saved
    ABANDONED = "abandoned"  # a later start had another configuration, and began anew


@dataclass(frozen=True, slots=True)
class GateOutcome:
    """One condition of the gate: the values, whether it passed, and why, in words."""

    metric: str
    passed: bool
    reason: str
    candidate: float | None = None
    champion: float | None = None


@dataclass(frozen=True, slots=True)
class RetrainRecord:
    """A retraining. Times are ISO 8601 in UTC. started_at, slot, user and host are of the latest start.

    stage: the last stage that is complete (see Stage).
    slot: the scheduled time that it is for, "" if none was given. config: the digest of workload, params and code.
    data: the digest of the training data. difference: how the data differ from those of the champion, in words.
    outputs: the states of a script's outputs before it ran, so that old ones are not taken for its own.
    scores: candidate and champion -> metrics of the evaluation. held_out: the digest of the held-out data.
    notes: what the evaluation could not do, in words. promoted_anyway: although the gate rejected it.
    champion: the version that was the champion before, None if there was none. version: the version that it created.
    reason: why it ended as it did, in one line. told: the events that users were notified of.
    """

    number: int
    model: str
    started_at: str
    run_id: str = ""
    config: str = ""
    status: str = RetrainStatus.RUNNING
    stage: str = Stage.NONE
    slot: str = ""
    forced: bool = False
    user: str = ""
    host: str = ""
    starts: int = 1
    ended_at: str | None = None
    exit_code: int | None = None
    reason: str = ""
    data: str = ""
    difference: tuple[str, ...] = ()
    n_files: int = 0
    size_bytes: int = 0
    outputs: Mapping[str, str] = field(default_factory=dict)
    scores: Mapping[str, Numbers] = field(default_factory=dict)
    held_out: str = ""
    notes: tuple[str, ...] = ()
    gate: tuple[GateOutcome, ...] = ()
    champion: int | None = None
    version: int | None = None
    promoted_anyway: bool = False
    told: tuple[str, ...] = ()
    schema: int = SCHEMA

    @property
    def is_running(self) -> bool:
        """Whether it has no end yet: it is running, or its process was killed."""
        return self.status == RetrainStatus.RUNNING

    @property
    def is_success(self) -> bool:
        """Whether the model is up to date afterwards."""
        return self.status in (RetrainStatus.PROMOTED, RetrainStatus.UNCHANGED)

    def to_json(self) -> bytes:
        """Return the content of the file."""
        return (json.dumps(as_json_data(dataclasses.asdict(self)), indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, name: str) -> Self:
        """Read the file; fields of newer versions are ignored. Raises RegistryDamaged."""
        record = cast(Self, decoded(cls, data, name))
        times = (record.started_at, record.ended_at or record.started_at)
        is_valid = all(map(_is_time, times)) and record.stage in list(Stage) and record.number >= 0
        if not is_valid or (record.run_id and not valid_run_id(record.run_id)):
            raise RegistryDamaged(
                f"{name} is damaged: its times, stage, number or run_id are not those of a retraining"
            )
        return record


class RetrainRecords:
    """The retrainings of one model. All methods raise StoreError if the registry cannot be read or written."""

    def __init__(self, registry: Store, model: str) -> None:
        """registry: the folder of all models (ModelRegistry.folder)."""
        self._folder = registry.below(model).below("retrainings")
        self._skipped = registry.below(model).below("skipped")
        self._is_folder = isinstance(registry, OwnFolder)
        self._written: dict[int, Versioned] = {}

    def newest(self, count: int) -> list[RetrainRecord]:
        """Return the newest `count` retrainings, newest first. Raises RegistryDamaged."""
        numbers = sorted(self.numbers(), reverse=True)[:count]
        contents = self._folder.read_all([_name(number) for number in numbers])
        return [RetrainRecord.from_json(data, f"{self._folder.url}/{name}") for name, data in contents.items()]

    def numbers(self) -> list[int]:
        """Return the numbers of all retrainings."""
        return self._numbers(".json")

    def _numbers(self, suffix: str) -> list[int]:
        paths = [PurePosixPath(path) for path in self._folder.files()]
        return [int(path.stem) for path in paths if path.suffix == suffix and path.stem.isdecimal()]

    def next_number(self) -> int:
        """Return the number of the next retraining."""
        return max(self.numbers(), default=0) + 1

    def create(self, record: RetrainRecord) -> RetrainRecord:
        """Write a new retraining, under the next number if it has none. Raises WriteConflict if another process did."""
        number = record.number or self.next_number()
        numbered = dataclasses.replace(record, number=number)
        self._written[number] = self._folder.write_versioned(_name(number), numbered.to_json(), None)
        return numbered

    def adopt(self, number: int) -> RetrainRecord:
        """Read a retraining that this process continues. Raises RegistryDamaged."""
        where = f"{self._folder.url}/{_name(number)}"
        if self._is_folder:
            data = self._folder.read(_name(number), _RECORD_BYTES)
        else:
            versioned = self._folder.read_versioned(_name(number))
            data = versioned.data if versioned else None
            if versioned:
                self._written[number] = versioned
        if data is None:
            raise RegistryDamaged(f"{where} is missing")
        record = RetrainRecord.from_json(data, where)
        if record.number != number:  # update() would replace another one
            raise RegistryDamaged(f"{where} is damaged: it is of retraining {record.number}")
        return record

    def update(self, record: RetrainRecord) -> None:
        """Rewrite a retraining of this process. Raises WriteConflict if another process has changed it."""
        if self._is_folder:  # this process holds the lock of the model
            self._folder.write(_name(record.number), record.to_json())
        else:
            before = self._written[record.number]
            self._written[record.number] = self._folder.write_versioned(_name(record.number), record.to_json(), before)

    def write_listing(self, number: int, data: bytes) -> None:
        """Write the listing of the training data of a retraining."""
        self._folder.write(f"{number:06d}.listing", data)

    def listed(self) -> list[int]:
        """Return the numbers of the retrainings whose listing is kept, newest first."""
        return sorted(self._numbers(".listing"), reverse=True)

    def listing(self, number: int) -> bytes | None:
        """Return the listing of the training data of a retraining, None if there is none."""
        return self._folder.read(f"{number:06d}.listing")

    def add_skip(self, reason: str, slot: str) -> None:
        """Record a start that has no record of its own; only the newest are kept."""
        time = utc_now()
        skip = {"time": time, "reason": reason, "slot": slot, "host": socket.gethostname(), "pid": os.getpid()}
        name = f"{time.replace(':', '')}-{secrets.token_hex(3)}.json"
        self._skipped.write(name, (json.dumps(skip) + "\n").encode())
        for old in sorted(self._skipped.files())[:-_KEPT_SKIPS]:
            self._skipped.remove(old)

    def late_told(self) -> str:
        """Return when users were last notified that the model is late, "" for never. A later success ends this."""
        told_at = (self._folder.read(_LATE, _RECORD_BYTES) or b"").decode(errors="replace").strip()
        return told_at if _is_time(told_at) else ""

    def record_late(self) -> None:
        """Record that users were notified just now that the model is late."""
        self._folder.write(_LATE, f"{utc_now()}\n".encode())

    def skips(self) -> list[dict[str, Any]]:
        """Return the newest starts without a record of their own, oldest first: time, reason, slot, host and pid."""
        contents = self._skipped.read_all(sorted(self._skipped.files())[-_KEPT_SKIPS:])
        skips: list[dict[str, Any]] = []
        for data in contents.values():
            with suppress(ValueError, RecursionError, TypeError):
                skips.append(dict(json.loads(data)))
        return skips

    def remove_older(self, versions: Collection[int]) -> None:
        """Delete the oldest listings and records. The records of `versions`, and unfinished ones, stay."""
        for path in [path for path in sorted(self._folder.files()) if path.endswith(".listing")][:-_KEPT_LISTINGS]:
            self._folder.remove(path)
        old = [_name(number) for number in sorted(self.numbers())[:-_KEPT_RECORDS]]
        for name, data in self._folder.read_all(old).items():
            with suppress(RegistryDamaged):  # it stays: it may be of a version
                record = RetrainRecord.from_json(data, name)
                if record.version not in versions and not record.is_running:
                    self._folder.remove(name)


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _name(number: int) -> str:
    return f"{number:06d}.json"
