"""What a retraining has done so far, as JSON beside the versions of its model; a later start continues from it.

MODEL/retrainings/000001.json   one retraining, from its start to its end; rewritten after each stage
MODEL/retrainings/run.lock      the lock of the process that retrains the model (see retrain/start.py)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, Field

from ddptrain.model_registry.records import JsonRecord, Numbers, RegistryDamaged
from ddptrain.results.layout import valid_run_id
from ddptrain.storage.store import Store

SCHEMA = 1
_RECORD_BYTES = 4 << 20
_KEPT_RECORDS = 200  # more than any reader looks at


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


def _time(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("a time without a zone")
    return text


def _run_id(text: str) -> str:
    if text and not valid_run_id(text):
        raise ValueError("it is not the id of a run")
    return text


_Time = Annotated[str, AfterValidator(_time)]


@dataclass(frozen=True, slots=True)
class GateOutcome:
    """One condition of the gate: the values, whether it passed, and why, in words."""

    metric: str
    passed: bool
    reason: str
    candidate: float | None = None
    champion: float | None = None


@dataclass(frozen=True, slots=True)
class RetrainRecord(JsonRecord):
    """A retraining. Times are ISO 8601 in UTC. started_at, slot, user and host are of the latest start.

    stage: the last stage that is complete (see Stage).
    slot: the scheduled time that it is for, "" if none was given. config: the digest of workload, params and code.
    data: the digest of the training data, whose folders are `classes`, if they are not too many. difference: how they
    differ from those of the champion, in words.
    scores: candidate and champion -> metrics of the evaluation. held_out: the digest of the held-out data.
    notes: what the evaluation could not do, in words.
    champion: the version that was the champion before, None if there was none. version: the version that it created.
    reason: why it ended as it did, in one line. told: the events that users were notified of.
    """

    number: Annotated[int, Field(ge=0)]
    model: str
    started_at: _Time
    run_id: Annotated[str, AfterValidator(_run_id)] = ""
    config: str = ""
    status: str = RetrainStatus.RUNNING
    stage: Stage = Stage.NONE
    slot: str = ""
    forced: bool = False
    user: str = ""
    host: str = ""
    starts: int = 1
    ended_at: _Time | None = None
    exit_code: int | None = None
    reason: str = ""
    data: str = ""
    difference: tuple[str, ...] = ()
    n_files: int = 0
    size_bytes: int = 0
    classes: tuple[str, ...] = ()
    scores: Mapping[str, Numbers] = field(default_factory=dict)
    held_out: str = ""
    notes: tuple[str, ...] = ()
    gate: tuple[GateOutcome, ...] = ()
    champion: int | None = None
    version: int | None = None
    told: tuple[str, ...] = ()
    schema: int = SCHEMA

    @property
    def is_running(self) -> bool:
        """Whether it has no end yet: it is running, or its process was killed."""
        return self.status == RetrainStatus.RUNNING


class RetrainRecords:
    """The retrainings of one model. All methods raise StoreError if the registry cannot be read or written.

    The process that holds the lock of the model writes.
    """

    def __init__(self, registry: Store, model: str) -> None:
        """registry: the folder of all models (ModelRegistry.folder)."""
        self._folder = registry.below(model).below("retrainings")

    def newest(self, count: int) -> list[RetrainRecord]:
        """Return the newest `count` retrainings, newest first. Raises RegistryDamaged."""
        contents = self._folder.read_all([_name(number) for number in self._numbers()[:count]])
        return [RetrainRecord.from_json(data, f"{self._folder.url}/{name}") for name, data in contents.items()]

    def _numbers(self) -> list[int]:
        paths = [PurePosixPath(path) for path in self._folder.files()]
        return sorted((int(p.stem) for p in paths if p.suffix == ".json" and p.stem.isdecimal()), reverse=True)

    def create(self, record: RetrainRecord) -> RetrainRecord:
        """Write a new retraining under the next number, and return it. Raises WriteConflict if another process did."""
        numbered = dataclasses.replace(record, number=max(self._numbers(), default=0) + 1)
        self._folder.write_versioned(_name(numbered.number), numbered.to_json(), None)
        return numbered

    def read(self, number: int) -> RetrainRecord:
        """Return a retraining. Raises RegistryDamaged."""
        where = f"{self._folder.url}/{_name(number)}"
        if (data := self._folder.read(_name(number), _RECORD_BYTES)) is None:
            raise RegistryDamaged(f"{where} is missing")
        record = RetrainRecord.from_json(data, where)
        if record.number != number:  # update() would replace another one
            raise RegistryDamaged(f"{where} is damaged: it is of retraining {record.number}")
        return record

    def update(self, record: RetrainRecord) -> None:
        """Rewrite a retraining."""
        self._folder.write(_name(record.number), record.to_json())

    def remove_older(self, versions: Collection[int]) -> None:
        """Delete the oldest records. Those of `versions`, and unfinished ones, stay."""
        for name, data in self._folder.read_all([_name(n) for n in self._numbers()[_KEPT_RECORDS:]]).items():
            with suppress(RegistryDamaged):  # it stays: it may be of a version
                record = RetrainRecord.from_json(data, name)
                if record.version not in versions and not record.is_running:
                    self._folder.remove(name)


def _name(number: int) -> str:
    return f"{number:06d}.json"
