"""Deletes runs in an object store, so that a kill at any moment leaves no partial run.

1. The lease of the run is taken.
2. A mark file is written.
3. run.json is deleted. From now on readers do not find the run.
4. The other files are deleted, then the mark, then the lock file of the lease.

If the process dies before the end, the next prune finds a mark without run.json, and continues when the lease has
expired.
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
    """The runs of an object store, for `prune`; their files are listed once, at the start. Raises StoreError."""

    def __init__(self, runs: StoreRuns) -> None:
        self._runs = runs
        self._files: dict[str, dict[str, int]] = {}  # run -> path in the run -> size in bytes
        for path, file in runs.store.files().items():
            run, _, inside = path.partition("/")
            if inside and valid_run_id(run):
                self._files.setdefault(run, {})[inside] = file.size_bytes

    def facts(self, view: RunView, age_s: float) -> RunFacts:
        """Return the facts by which the policy decides about a run; `age_s`: seconds since its end."""
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

    def remove(self, chosen: RunView) -> None:
        """Delete a run, and its working folder on this machine.

        chosen: the run as it was when the decision was made. Raises RunLocked, StoreError.
        """
        name = chosen.layout.root.name
        with _lease(self._runs.store.below(name)) as run:
            _refuse_if_changed(run, chosen)
            run.write(MARK, (json.dumps({"since": time.time()}) + "\n").encode())
            run.remove(_RECORD)
            _log.info("run.json deleted", run=name, store=run.url)
            _remove_files(run, run.files())
            shutil.rmtree(self._runs.work / name, ignore_errors=True)  # left by a driver that was killed

    def leftovers(self) -> list[tuple[str, int]]:
        """Return the runs whose deletion was interrupted, each with the size of what remains in bytes."""
        interrupted = (run for run, files in self._files.items() if MARK in files and _RECORD not in files)
        return [(run, sum(self._files[run].values())) for run in sorted(interrupted)]

    def finish(self, name: str) -> None:
        """Delete one of `leftovers`. Raises RunLocked, StoreError."""
        with _lease(self._runs.store.below(name)) as run:
            files = run.files()
            if MARK in files and _RECORD not in files:
                _remove_files(run, files)


@contextmanager
def _lease(run: RemoteFolder) -> Iterator[RemoteFolder]:
    """Hold the lease of a run; yield its folder. If no other file is left at the end, delete the lock file."""
    lock = StoreLock(run)
    lock.take()
    is_gone = False
    try:
        lock.keep()  # if the lease is lost, `guard` raises at the next change
        yield replace(run, guard=lock.assure)
        is_gone = set(run.files()) <= {LOCK}
    finally:
        lock.release(forget=is_gone)


def _refuse_if_changed(run: RemoteFolder, chosen: RunView) -> None:
    """Raise RunLocked if a driver has resumed the run since it was chosen."""
    data = run.read(_RECORD)
    try:
        now = RunRecord.from_json(data) if data is not None else None
    except RecordError:
        now = None
    if now is None or now.driver != chosen.record.driver:
        raise RunLocked(f"run {chosen.run_id} has changed since it was chosen")


def _remove_files(run: RemoteFolder, paths: Collection[str]) -> None:
    """Delete the files in parallel, then the mark; the lock file stays. Raises StoreError."""
    with ThreadPoolExecutor(_DELETERS, thread_name_prefix="ddptrain-prune") as pool:
        list(pool.map(run.remove, [path for path in paths if path not in (MARK, LOCK)]))
    run.remove(MARK)
