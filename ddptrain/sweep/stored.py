"""Sweeps in an object store: a working folder of this machine that is uploaded, and the lease of the sweep.

The journal is uploaded in pieces, journal/<offset of its first byte>.log: objects can't be appended to. A point
is in the store before its trial begins; a result that a killed driver did not upload is taken from the trial's run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from ddptrain.errors import DdptrainError, UsageError
from ddptrain.log import Log
from ddptrain.results import ownership
from ddptrain.results.checkpoints.verification import metrics_in, parse_manifest
from ddptrain.results.errors import ResultsError, results_errors
from ddptrain.results.layout import MANIFEST, check_run_id, new_run_id, valid_run_id
from ddptrain.results.lookup import RunView
from ddptrain.results.remote.checkpoint_upload import CHECKPOINTS
from ddptrain.results.remote.lease import StoreLock
from ddptrain.results.remote.local_copy import Origin
from ddptrain.results.remote.runs import StoreRuns, download_working_folder
from ddptrain.results.remote.upload import StoreUpload
from ddptrain.results.run_store import NeededFiles
from ddptrain.results.secure_files import write_file
from ddptrain.storage.remote_folder import RemoteFolder, is_plain
from ddptrain.sweep.metric import values_of_run
from ddptrain.sweep.records import SWEEP_JSON, SweepRecord, choose_sweep, newest_first, parse_sweep

WORK_LOCK = ".sweep.lock"  # of the working folder: ddptrain stop finds the process of the driver by it
_FILES = (SWEEP_JSON, "config.yaml", "driver.log", "best.yaml")
_PIECES, _JOURNAL = "journal", ".journal.log"  # the upload leaves out names that begin with a dot
_DIGITS = 15
_PASSES = 5  # of the upload that may fail in a row; then the sweep saves and ends
_log = Log(__name__)


class StoredSweep:
    """One sweep in a store, held by this process. folder: its working folder."""

    def __init__(self, runs: StoreRuns, sweep_id: str, uploads: StoreUpload) -> None:
        self.sweep_id, self.folder = sweep_id, uploads.root
        self.where = self.runs_dir = f"{runs.store.url}/{sweep_id}"
        self.journal = self.folder / _JOURNAL
        self._trials = StoreRuns(runs.store.below(sweep_id))
        self._uploads = uploads
        self._kept_bytes = 0  # of the journal: in the store, or in pieces that are being uploaded

    def find_trial(self, run_id: str) -> RunView | None:
        """Return a trial's run; None if it has not begun. Raises StoreError."""
        return self._trials.find_exact(run_id, NeededFiles.METRICS)

    def values(self, view: RunView, metric: str) -> dict[float, float]:
        """Return the values of the metric in a run, by step. Raises StoreError."""
        run = self._trials.store.below(view.run_id)
        paths = [path for path in run.files(CHECKPOINTS) if path.endswith(f"/{MANIFEST}") and is_plain(path)]
        manifests = filter(None, map(parse_manifest, run.read_all(paths).values()))
        saved = {float(each["step"]): found.get(metric) for each in manifests if (found := metrics_in(each))}
        return values_of_run(view, metric, {step: value for step, value in saved.items() if value is not None})

    def cut_journal(self) -> None:
        """Write the new part of the journal into a file for upload. Raises ResultsError."""
        with results_errors(self.journal), self.journal.open("rb") as file:
            file.seek(self._kept_bytes)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        if new:
            with results_errors(self.folder):
                (self.folder / _PIECES).mkdir(exist_ok=True)
            write_file(self.folder / _PIECES / _piece_name(self._kept_bytes), new)
            self._kept_bytes += len(new)

    def upload(self, within_s: float) -> str:
        """Upload everything as it is now. Returns "", or one line about the problem if the time was too short."""
        return self._uploads.flush(within_s)

    def listen(self, warn: Callable[[str], None], lost: Callable[[DdptrainError], None]) -> None:
        """Call `warn` for each failure of the upload, and `lost` once if the sweep must end."""
        self._uploads.listen(warn, lost)

    def begin(self, run: RemoteFolder, token: str) -> None:
        """Read how much of the journal is in the store, and start the upload. Raises ResultsError, StoreError."""
        pieces = _pieces(run)
        self._kept_bytes = sum(pieces.values())
        shutil.rmtree(self.folder / _PIECES, ignore_errors=True)  # the journal has them
        Origin(run.url, token).mark(self.folder)
        self._uploads.begin()


class StoredSweeps:
    """The sweeps in a folder of a store."""

    def __init__(self, runs: StoreRuns) -> None:
        self._runs, self._store = runs, runs.store

    def find(self, name: str | None, sweep_id: str | None) -> str:
        """Return the id of a sweep: that one, or the newest (of that name). Raises RunNotFound, StoreError."""
        if sweep_id is not None and valid_run_id(sweep_id) and self._read(sweep_id) is not None:
            return sweep_id
        return choose_sweep(self.list(), self._store.url, name, sweep_id)

    def list(self, known_runs: Container[str] = ()) -> dict[str, SweepRecord]:
        """Return the sweeps by id, the newest first; `known_runs` are no sweeps. Raises StoreError."""
        names = [name for name in self._store.folders() if valid_run_id(name) and name not in known_runs]
        paths = [f"{name}/{SWEEP_JSON}" for name in names]
        sweeps: dict[str, SweepRecord] = {}
        for path, data in self._store.read_all(paths).items():
            try:
                sweeps[path.partition("/")[0]] = parse_sweep(data, f"{self._store.url}/{path}")
            except UsageError as error:
                _log.info("sweep passed over", reason=error)
        return newest_first(sweeps)

    def read(self, sweep_id: str) -> SweepRecord:
        """Return the record of a sweep. Raises UsageError, StoreError."""
        return parse_sweep(self._read(sweep_id) or b"", f"{self._store.url}/{sweep_id}/{SWEEP_JSON}")

    def create(self, name: str, sweep_id: str | None) -> AbstractContextManager[StoredSweep]:
        """Begin a sweep, and hold its lock for the block. Raises UsageError, RunLocked, StoreError, ResultsError."""
        if sweep_id is not None:
            check_run_id(sweep_id)
            if self._store.below(sweep_id).read("run.json") is not None:
                raise UsageError(f"{self._store.url}/{sweep_id} is a run; choose another --sweep-id")
            if self._read(sweep_id) is not None:
                raise UsageError(f"{self._store.url}/{sweep_id} exists already; continue it with --resume")
        return self._held(sweep_id or new_run_id(name), resumed=False)

    def resume(self, sweep_id: str) -> AbstractContextManager[StoredSweep]:
        """Resume a sweep, and hold its lock for the block. Raises RunLocked, StoreError, ResultsError."""
        return self._held(sweep_id, resumed=True)

    @contextmanager
    def _held(self, sweep_id: str, *, resumed: bool) -> Iterator[StoredSweep]:
        run = self._store.below(sweep_id)
        lock = StoreLock(run)
        before = lock.take()
        guarded = replace(run, guard=lock.assure)
        uploads = StoreUpload(guarded, self._runs.folder / sweep_id, lock.claim.token, _PASSES)
        try:
            lock.keep(uploads.lose)
            if resumed:
                download_working_folder(run, uploads, before, _download)
            else:
                for path in run.files(_PIECES):  # of a driver that was killed before its first trial
                    run.remove(path)
                download_working_folder(run, uploads, None, lambda *_: None)
            sweep = StoredSweep(self._runs, sweep_id, uploads)
            sweep.begin(run, lock.claim.token)
            descriptor = ownership.take(uploads.root / WORK_LOCK)
            try:
                with uploads:
                    yield sweep
            finally:
                os.close(descriptor)
        finally:
            lock.release(forget=not resumed and not uploads.begun)

    def _read(self, sweep_id: str) -> bytes | None:
        return self._store.below(sweep_id).read(SWEEP_JSON)


def _download(run: RemoteFolder, folder: Path, warn: Callable[[str], None]) -> None:
    """Download a sweep into an empty folder. Raises ResultsError, StoreError."""
    files = run.files()
    for name in _FILES:
        if name in files:
            run.fetch(name, folder / name)
    names = list(_pieces(run))
    contents = run.read_all([f"{_PIECES}/{name}" for name in names])
    write_file(folder / _JOURNAL, b"".join(contents[f"{_PIECES}/{name}"] for name in names))


def _pieces(run: RemoteFolder) -> dict[str, int]:
    """Return the pieces of the journal with their sizes, in their order. Raises ResultsError if one is missing."""
    listed = {path.removeprefix(f"{_PIECES}/"): file.size_bytes for path, file in run.files(_PIECES).items()}
    pieces = dict(sorted(listed.items()))
    offset = 0
    for name, size_bytes in pieces.items():
        if name != _piece_name(offset):
            raise ResultsError(f"{run.url}/{_PIECES} is damaged: after {offset} bytes comes {name}; begin a new sweep")
        offset += size_bytes
    return pieces


def _piece_name(offset: int) -> str:
    return f"{offset:0{_DIGITS}d}.log"
