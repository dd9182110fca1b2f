"""What a start of `ddptrain retrain` is given, shows and holds: its options, its output, the lock of its model."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ddptrain.errors import DdptrainError, RunLocked
from ddptrain.log import Log
from ddptrain.model_registry.own_folder import OwnFolder
from ddptrain.reports.destinations import Reporting
from ddptrain.results.ownership import LockFile, Owner
from ddptrain.results.remote.lease import LOCK, Lease
from ddptrain.results.run_record import as_json_data
from ddptrain.sanitize import sanitized
from ddptrain.storage.object_store import ObjectStore
from ddptrain.storage.store import Store

_log = Log(__name__)
_TRY_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class RetrainOptions:
    """The options of the command line besides the configuration.

    slot: the scheduled time as resolve_slot (schedule/entries.py) returns it, or "".
    """

    force: bool = False
    slot: str = ""
    dry_run: bool = False
    output: str = "auto"
    full_traceback: bool = False
    all_ranks: bool = False
    reporting: Reporting | None = None


@dataclass(slots=True)
class StageOutput:
    """The output of one start. Messages of stages that were done by an earlier start are not shown again.

    stages: the object of each stage so far, for the last object of `--output json`.
    """

    as_json: bool
    stages: list[dict[str, Any]] = field(default_factory=list)
    _began_s: float = field(default_factory=time.monotonic)

    def stage(self, name: str, text: str, **details: object) -> None:
        """Show that a stage is complete, with its result, and its duration since the end of the previous stage."""
        now_s = time.monotonic()
        fields = {"stage": name, "message": text, "duration_s": round(now_s - self._began_s, 3), **details}
        self._began_s = now_s
        self.stages.append(fields)
        _log.info("stage complete", stage=name, message=text)
        self._show(f"{name}: {text}", {"event": "retrain_stage", "time_s": round(time.time(), 3), **fields})

    def notice(self, text: str, level: str = "info") -> None:
        """Show a message."""
        _log.info("notice", message=text)
        self._show(text, {"event": "notice", "time_s": round(time.time(), 3), "level": level, "message": text})

    def warn(self, text: str) -> None:
        """Show a warning."""
        self.notice(text, level="warning")

    def end(self, summary: str, last_event: Mapping[str, Any]) -> None:
        """Show the end of the retraining: the summary on stdout, or the last JSON object, with all stages."""
        if self.as_json:
            self._show("", {"event": "retrain_finished", **last_event, "stages": self.stages})
        else:
            with suppress(OSError, ValueError):
                print(sanitized(summary), flush=True)

    def _show(self, text: str, fields: Mapping[str, Any]) -> None:
        lines = "".join(f"ddptrain: {sanitized(line)}\n" for line in text.splitlines())
        with suppress(OSError, ValueError, AttributeError):  # nobody reads any more: the retraining continues
            if self.as_json:
                print(json.dumps(as_json_data(fields), allow_nan=False), flush=True)
            else:
                print(lines, end="", file=sys.stderr, flush=True)


class ModelLock:
    """One owner for each model: a lock file in a folder, a lease in an object store. Both end with their process.

    lost: why another process has the lock now; this one has got SIGTERM then.
    """

    def __init__(self, registry: Store, model: str) -> None:
        """registry: the folder of all models (ModelRegistry.folder)."""
        self._folder = registry.below(model).below("retrainings")
        self._lock: Owner | None = None
        self.model = model
        self.lost: DdptrainError | None = None

    @property
    def is_held(self) -> bool:
        """Whether this process has the lock."""
        return self._lock is not None

    @contextmanager
    def held(self, wait_s: float, report: Callable[[str], None], stop_other: Callable[[], None]) -> Iterator[None]:
        """Hold the lock for the block.

        wait_s: how long to wait for another process; stop_other is called before each attempt. report: shows a line.

        Raises RunLocked if another process holds the lock for longer; StoreError, ResultsError.
        """
        deadline, waits = time.monotonic() + wait_s, False
        while True:
            lock = self._new_lock()
            try:
                lock.take()
                break
            except RunLocked:
                busy = f"model {self.model} is being retrained by {lock.holder() or 'another process'}"
            if wait_s > 0 and not waits:
                waits = True
                report(f"{busy}; waiting for its end")
            if time.monotonic() >= deadline:
                raise RunLocked(f"{busy} and did not end within {wait_s:g} s" if waits else busy)
            stop_other()
            time.sleep(_TRY_EVERY_S)
        self._lock = lock
        lock.keep(self._lose)
        try:
            yield
        finally:
            self._lock = None
            lock.release()

    def assure(self) -> None:
        """Check that this process still owns the model. Raises RunLocked, StoreError, ResultsError."""
        if self._lock is not None:
            self._lock.assure()

    def _new_lock(self) -> Owner:
        if isinstance(self._folder, ObjectStore):
            return Lease(self._folder)
        assert isinstance(self._folder, OwnFolder)
        self._folder.make_parent(LOCK)
        return LockFile(self._folder.folder / LOCK)

    def _lose(self, error: DdptrainError) -> None:
        self.lost = error
        os.kill(os.getpid(), signal.SIGTERM)
