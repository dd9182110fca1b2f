"""Deletes runs in an object store, so that a kill at any moment leaves no partial run.

The lease of the run is taken. A mark is written, then run.json is deleted: from now on readers do not find the run. Its
other files follow, then the mark, then the lease. If the process dies on the way, the next prune finds the mark of a
run without run.json, and goes on once the lease has ended.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from ddptrain.errors import RunLocked
from ddptrain.log import Log
from ddptrain.results.layout import MANIFEST, valid_run_id
from ddptrain.results.lookup import RunView
from ddptrain.results.prune.folder_removal import MARK
from ddptrain.results.prune.policy import RunFacts
from ddptrain.results.remote.lease import LOCK, StoreLock
from ddptrain.results.remote.runs import StoreRuns
from ddptrain.results.run_record import RecordError, RunRecord
from ddptrain.storage.remote_folder import RemoteFolder

_RECORD = "run.json"
_DELETERS = 16
_log = Log(__name__)


class StoredRemoval:
    """The runs of an object store, for `prune`; one listing gives all their files. Raises StoreError."""

    def __init__(self, runs: StoreRuns) -> None:
        self._runs = runs
        self._files: dict[str, dict[str, int]] = {}  # run -> path in the run -> size in bytes
        for path, file in runs.store.files().items():
            run, _, inside = path.partition("/")
            if inside and valid_run_id(run):
                self._files.setdefault(run, {})[inside] = file.size_bytes

    def facts(self, view: RunView, age_s: float) -> RunFacts:
        """Return what decides about a run. Whoever can write to the store owns all of its runs."""
        folder = view.layout.root.name
        files = self._files.get(folder, {})
        manifests = [path for path in files if path.startswith("checkpoints/") and path.endswith(f"/{MANIFEST}")]
        return RunFacts(
            folder=folder,
            run_id=view.run_id,
            name=view.record.name,
            status=view.status,
            age_s=age_s,
            size_bytes=sum(files.values()),
            has_checkpoint=bool(manifests),
            problem=view.problem,
        )

    def remove(self, seen: RunView) -> None:
        """Delete a run, and what is left of it on this machine.

        seen: the run as it was when the decision was made. Raises RunLocked, StoreError.
        """
        name = seen.layout.root.name
        with _lease(self._runs.store.below(name)) as run:
            _refuse_if_changed(run, seen)
            run.write(MARK, (json.dumps({"since": time.time()}) + "\n").encode())
            run.remove(_RECORD)
            _log.info("run.json deleted", run=name, store=run.url)
            _remove_files(run, run.files())
            shutil.rmtree(self._runs.work / name, ignore_errors=True)  # of a driver that was killed

    def leftovers(self) -> list[tuple[str, int]]:
        """Return the runs whose deletion was interrupted, each with the size of what remains in bytes."""
        found = (run for run, files in self._files.items() if MARK in files and _RECORD not in files)
        return [(run, sum(self._files[run].values())) for run in sorted(found)]

    def finish(self, name: str) -> None:
        """Delete one of `leftovers`. Raises RunLocked, StoreError."""
        with _lease(self._runs.store.below(name)) as run:
            files = run.files()
            if MARK in files and _RECORD not in files:
                _remove_files(run, files)


@contextmanager
def _lease(run: RemoteFolder) -> Iterator[RemoteFolder]:
    """Hold the lease of a run; yield its folder, which nobody else changes meanwhile. The lock file is deleted."""
    lock = StoreLock(run)
    lock.take(contested=True)
    is_gone = False
    try:
        lock.keep()  # the guard raises the loss of the lease at the next change
        yield replace(run, guard=lock.assure)
        is_gone = set(run.files()) <= {LOCK}
    finally:
        lock.release(forget=is_gone)


def _refuse_if_changed(run: RemoteFolder, seen: RunView) -> None:
    """Raise RunLocked if a driver has resumed the run since it was chosen."""
    data = run.read(_RECORD)
    try:
        now = RunRecord.from_json(data) if data is not None else None
    except RecordError:
        now = None
    if now is None or now.driver != seen.record.driver:
        raise RunLocked(f"run {seen.run_id} has changed since it was chosen")


def _remove_files(run: RemoteFolder, paths: Collection[str]) -> None:
    """Delete files, several at a time, and the mark after them; the lock file stays. Raises StoreError."""
    with ThreadPoolExecutor(_DELETERS, thread_name_prefix="ddptrain-prune") as pool:
        list(pool.map(run.remove, [path for path in paths if path not in (MARK, LOCK)]))
    run.remove(MARK)
