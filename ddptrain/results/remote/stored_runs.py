"""The runs of an object store. Readers download the files that they need; a driver's working folder is uploaded."""

from __future__ import annotations

import errno
import gzip
import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from ddptrain import file_ops
from ddptrain.errors import RunLocked, UsageError
from ddptrain.log import Log
from ddptrain.results.annotations import FILE as ANNOTATIONS
from ddptrain.results.annotations import Annotations, Change, edit_folder, edit_stored
from ddptrain.results.errors import results_errors
from ddptrain.results.layout import INPUTS, LATEST, MANIFEST, RECORDED, Origin, origin_of, valid_run_id
from ddptrain.results.remote.checkpoints import CHECKPOINTS, download_checkpoints, download_model, download_newest
from ddptrain.results.remote.lease import LOCK, Claim, Lease, claim_from
from ddptrain.results.remote.uploader import Uploader, grows, joined
from ddptrain.results.run import Run
from ddptrain.results.run_record import SWEEP, RecordError, RunRecord, RunStatus
from ddptrain.results.runs import Runs
from ddptrain.storage.object_store import ObjectStore
from ddptrain.storage.store import Listed, NotFound, StoreError, TooLarge, WriteConflict, is_plain
from ddptrain.tracking.wandb_files import LINKS

MARK = ".pruned.json"  # in a run whose deletion has begun
INDEX = ".index.json.gz"  # beside the runs
_RECORD = "run.json"
_SWEEP = "sweep.json"
_SMALL = (_RECORD, ANNOTATIONS, f"{RECORDED}/{LINKS}")  # the files that a list needs
_FOLLOW_EVERY_S = 3.0
_THREADS = 16
_FEW = 100  # runs that have no index
_FEW_FILES = 3000  # of all runs; a request lists 1,000
_LARGEST_INDEXED = 64 << 10  # bytes of a record
_CONTINUED = ("run.json", "sweep.json", "config.yaml", "driver.log", "*.jsonl", "logs/*", f"{INPUTS}/*")
_log = Log(__name__)


class StoredRun(Run):
    """A run in an object store, as it was when it was found. Files are downloaded to `root` when they are needed.

    A copy has the time of the file in the store, whose nanoseconds stand for its version.
    """

    def __init__(
        self,
        store: ObjectStore,
        root: Path,
        files: Mapping[str, Listed] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """store: the folder of the run. files: all of them, if they are known. texts: small files of an indexed run."""
        super().__init__(root)
        self.store = store
        self._small: dict[str, bytes | None] = {}  # what was read of the files that a list needs
        if texts is not None:
            self._small = {name: texts[name].encode() if name in texts else None for name in _SMALL}
        if files is not None:
            self.files = joined(files)

    @cached_property
    def files(self) -> dict[str, dict[str, Listed]]:
        """The files of the run by name, each with the objects that it consists of."""
        return joined(self.store.files())

    where = property(lambda self: self.store.url)
    is_original = property(lambda self: False)

    @property
    def is_sweep(self) -> bool:
        """See Run."""
        return self.kind == SWEEP

    def _kind(self) -> str:
        return SWEEP if _SWEEP in self.files else ""

    def file(self, name: str) -> Path:
        """See Run."""
        if (objects := self.files.get(name)) is not None and is_plain(name):
            try:
                _fetch_changed(self.store, name, objects, self.root / name)
            except NotFound:  # deleted meanwhile
                (self.root / name).unlink(missing_ok=True)
        elif name.endswith((".json", ".jsonl")):
            (self.root / name).unlink(missing_ok=True)  # of an earlier copy
        return self.root / name

    def read(self, name: str) -> bytes:
        """See Run. The files of the run are not listed for those that a list of runs needs."""
        if name not in _SMALL or "files" in self.__dict__:
            return super().read(name)
        if name not in self._small:
            try:
                self._small[name] = self.store.read(name)
            except TooLarge as error:
                raise OSError(errno.EFBIG, str(error)) from error
        if (data := self._small[name]) is None:
            raise FileNotFoundError(errno.ENOENT, "it does not exist", name)
        return data

    def _has_driver(self, record: RunRecord) -> bool:
        claim = claim_from(self.store.read(LOCK))
        return claim is not None and claim.is_held()

    def names_in(self, folder: str) -> dict[str, int]:
        """See Run: also files that are not downloaded."""
        inside = {name: objects for name, objects in self.files.items() if name.startswith(f"{folder}/")}
        sizes = {name: sum(each.size_bytes for each in objects.values()) for name, objects in inside.items()}
        return {name[len(folder) + 1 :]: size_bytes for name, size_bytes in sizes.items()}

    @property
    def changed_at(self) -> float:
        """See Run."""
        return max((each.modified_s for objects in self.files.values() for each in objects.values()), default=0.0)

    @property
    def size_bytes(self) -> int:
        """See Run."""
        return sum(each.size_bytes for objects in self.files.values() for each in objects.values())

    def why_foreign(self) -> str:
        """See Run: whoever may write to the store may delete its runs."""
        return ""

    def again(self) -> Self:
        """See Run."""
        return type(self)(self.store, self.root)

    def fetch(self, *patterns: str) -> Self:
        """See Run."""
        names = [name for name in self.files if any(fnmatchcase(name.lower(), pattern) for pattern in patterns)]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="ddptrain-copies") as pool:
            list(pool.map(self.file, names))
        return self

    def has_checkpoint(self) -> bool:
        """See Run."""
        return any(name.startswith(f"{CHECKPOINTS}/") and name.endswith(f"/{MANIFEST}") for name in self.files)

    def checkpoint(self, which: str = LATEST) -> Path:
        """See Run: that checkpoint is downloaded."""
        return download_model(self.store, self.root, self.files, which)

    def checkpoints(self) -> list[Path]:
        """See Run: all are downloaded."""
        download_checkpoints(self.store, self.root)
        return [path for path in super().checkpoints() if path.name in self.record.checkpoints]

    def follow(self, *patterns: str) -> Callable[[], Run]:
        """See Run."""
        run, looked_at = self, float("-inf")

        def look() -> Run:
            nonlocal run, looked_at
            if time.monotonic() - looked_at >= _FOLLOW_EVERY_S:
                run = run.again()
                _ = run.record  # before the last lines are read
                run.again().fetch(*patterns)
                looked_at = time.monotonic()
            return run

        return look

    def indexed(self) -> dict[str, str]:
        """Return the small files that a list needs, by path, if the run has ended; none if the record is large."""
        try:
            if self._has_driver(self.record):
                return {}  # it may have ended before, and is being continued
            record, texts = RunRecord.from_json(self.read(_RECORD)), {}
            for name in _SMALL if record.tracking else (_RECORD, ANNOTATIONS):
                with suppress(FileNotFoundError):
                    texts[name] = self.read(name).decode()
            has_ended = record.status != RunStatus.RUNNING
        except (StoreError, OSError, ValueError):  # the list is shown all the same
            return {}
        return texts if has_ended and sum(map(len, texts.values())) <= _LARGEST_INDEXED else {}


class StoredRuns(Runs):
    """Runs in an object store.

    work: the working folders of runs that drivers of this machine write. copies: what readers have downloaded.
    """

    def __init__(self, store: ObjectStore) -> None:
        from platformdirs import user_cache_path, user_state_path

        self.store = store
        self.where = store.url
        slug = re.sub(r"[^A-Za-z0-9]+", "-", store.url)[-40:].strip("-")
        name = f"{slug}-{file_ops.sha256(store.url.encode()).hexdigest()[:8]}"
        self.work = user_state_path("ddptrain", appauthor=False) / "runs" / name
        self.copies = user_cache_path("ddptrain", appauthor=False) / "runs" / name

    @property
    def folder(self) -> Path:  # type: ignore[override]
        """The folder in which a driver creates the folder of a new run."""
        return _private(self.work)

    def inside(self, name: str) -> StoredRuns:
        """See Runs."""
        return StoredRuns(self.store.below(name))

    def get(self, run_id: str) -> StoredRun | None:
        """See Runs."""
        run = StoredRun(self.store.below(run_id), _private(self.copies) / run_id)
        try:
            run.read(_RECORD)
        except FileNotFoundError:
            return run if _SWEEP in run.files and MARK not in run.files else None
        except OSError:  # the run is listed as unreadable
            return run
        return run

    # --- The list: a store with many runs has an index of those that have ended ---

    def list(self, kind: str = "", *, sizes: bool = False) -> list[Run]:
        """See Runs. From a listing of all files, if there are few, or `sizes`.

        Otherwise from the index, and the records of runs that it lacks.
        """
        _private(self.copies)
        index, before = ({}, None) if sizes else self._index()
        listing = None if index else self._listing(None if sizes else _FEW_FILES)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="ddptrain-copies") as pool:
            if listing is not None:
                found = [
                    StoredRun(self.store.below(name), self.copies / name, files)
                    for name, files in listing.items()
                    if _RECORD in files or (_SWEEP in files and MARK not in files)
                ]
            else:
                names = [name for name in self.store.folders() if valid_run_id(name)]
                found = [run for run in pool.map(lambda name: self._listed(name, index), names) if run is not None]
            list(pool.map(_prepare, [run for run in found if run.root.name not in index]))
        names_now = {run.root.name for run in found}
        for folder in file_ops.entries(self.copies):
            if folder.is_dir() and folder.name not in names_now:
                shutil.rmtree(folder, ignore_errors=True)
        if len(found) > _FEW and not sizes:
            self._write_index(index, before, found)
        return sorted((run for run in found if run.kind == kind), key=lambda run: run.age, reverse=True)

    def _listed(self, name: str, index: Mapping[str, Mapping[str, str]]) -> StoredRun | None:
        texts = index.get(name)
        return StoredRun(self.store.below(name), self.copies / name, texts=texts) if texts else self.get(name)

    def _listing(self, most: int | None = None) -> dict[str, dict[str, Listed]] | None:
        """Return all files of all runs: name of the run -> path in it -> file; None if there are more than `most`."""
        found: dict[str, dict[str, Listed]] = {}
        files = self.store.files(most=most)
        if most is not None and len(files) > most:
            return None
        for path, file in files.items():
            name, _, inside = path.partition("/")
            if inside and valid_run_id(name):
                found.setdefault(name, {})[inside] = file
        return found

    def _index(self) -> tuple[dict[str, dict[str, str]], Any]:
        """Return the small files of runs that have ended, by run and path, and the version of the index."""
        before = None
        with suppress(StoreError, OSError, ValueError, EOFError):
            if (before := self.store.read_versioned(INDEX)) is not None:
                return json.loads(gzip.decompress(before.data)), before
        return {}, before  # a damaged one is written anew

    def _write_index(self, index: Mapping[str, Any], before: Any, runs: Sequence[StoredRun]) -> None:
        """Add runs that have ended, and remove deleted ones, if there are any. Readers without access leave it."""
        others = [run for run in runs if run.root.name not in index]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="ddptrain-copies") as pool:
            found = zip(others, pool.map(StoredRun.indexed, others), strict=True)
        new = {run.root.name: texts for run, texts in found if texts}
        kept = {run.root.name: index[run.root.name] for run in runs if run.root.name in index}
        if new or len(kept) < len(index):
            data = gzip.compress(json.dumps({**kept, **new}).encode(), 1)
            with suppress(StoreError):  # another reader was faster; this one may not write
                self.store.write_versioned(INDEX, data, before)

    def forget(self, run_id: str) -> None:
        """Remove a run from the index, because it changes. Raises StoreError.

        The index is written in any case: a reader that has looked at the run before can't add it then.
        """
        while self.store.read_versioned(INDEX) is not None:
            index, before = self._index()
            index.pop(run_id, None)
            with suppress(WriteConflict):
                self.store.write_versioned(INDEX, gzip.compress(json.dumps(index).encode(), 1), before)
                return

    # --- Changes ---

    def edit(self, run: str, change: Change) -> Annotations:
        """See Runs."""
        found = self.find(run)
        if not isinstance(found, StoredRun):
            return edit_folder(found.root, change)
        changed = edit_stored(found.store, change)
        forget_run(found.store)
        return changed

    @contextmanager
    def claim(self, run_id: str, *, resumed: bool) -> Iterator[Uploader]:
        """See Runs."""
        run = self.store.below(run_id)
        if not resumed and run.read(_RECORD) is not None:
            raise UsageError(f"run {run_id} exists already in {self.store.url}; choose another --run-id")
        lock = Lease(run).take()
        uploads = Uploader(replace(run, guard=lock.assure), self.work / run_id, lock.claim.token)
        try:
            lock.keep(uploads.lose)
            self.forget(run_id)
            if resumed:
                _download_working_folder(run, uploads, lock.before)
                Origin(run.url, lock.claim.token).mark(uploads.root)
            with closing(uploads):
                yield uploads
        finally:
            with suppress(StoreError):  # what was indexed meanwhile is not the end
                self.forget(run_id)
            lock.release(forget=not resumed and not uploads.begun)

    # Deletion: a mark is written, and run.json is deleted before the other files.

    def delete(self, chosen: Run) -> None:
        """See Runs. The run's working folder on this machine is deleted as well."""
        name = chosen.root.name
        if chosen.root.parent != self.copies:
            raise UsageError(f"{chosen.run_id} is a trial of a sweep in a store: only whole runs can be deleted there")
        with _lease(self.store.below(name)) as run:
            now = None
            with suppress(RecordError):
                now = RunRecord.from_json(run.read(_RECORD) or b"")
            if now is None or now.driver != chosen.record.driver:
                raise RunLocked(f"run {chosen.run_id} has changed since it was chosen")
            self.forget(name)
            run.write(MARK, (json.dumps({"since": time.time()}) + "\n").encode())
            run.remove(_RECORD)
            _log.info("run.json deleted", run=name, store=run.url)
            _remove_files(run, run.files())
            shutil.rmtree(self.work / name, ignore_errors=True)  # left by a driver that was killed

    def leftovers(self) -> dict[str, int]:
        """See Runs."""
        interrupted = {name: files for name, files in sorted((self._listing() or {}).items()) if _is_interrupted(files)}
        return {name: sum(file.size_bytes for file in files.values()) for name, files in interrupted.items()}

    def finish(self, name: str) -> None:
        """See Runs."""
        with _lease(self.store.below(name)) as run:
            if _is_interrupted(files := run.files()):
                _remove_files(run, files)


def forget_run(run: ObjectStore) -> None:
    """Remove the run in a folder of a store from the index beside it. Raises StoreError."""
    parent, _, name = run.path.rpartition("/")
    StoredRuns(replace(run, path=parent)).forget(name)


def _prepare(run: StoredRun) -> None:
    """Read what a list shows of a run."""
    _ = run.record, run.kind, run.annotations


def _fetch_changed(run: ObjectStore, path: str, objects: Mapping[str, Listed], target: Path) -> None:
    """Download a file of a run, which consists of these objects, unless the copy has its size and its time.

    Of a file that has grown only the new part is downloaded.
    """
    version = "".join(each.version for each in objects.values())
    size_bytes = sum(each.size_bytes for each in objects.values())
    modified_s = int(max(each.modified_s for each in objects.values()))
    time_ns = modified_s * 10**9 + int(file_ops.sha256(version.encode()).hexdigest()[:7], 16)
    have_bytes = 0
    with suppress(OSError):
        state = target.stat()
        if version and (state.st_size, state.st_mtime_ns) == (size_bytes, time_ns):
            return
        have_bytes = state.st_size if grows(path) and state.st_size < size_bytes else 0
    run.fetch(objects, target, have_bytes, time_ns)


def _is_interrupted(files: Collection[str]) -> bool:
    return MARK in files and _RECORD not in files


@contextmanager
def _lease(run: ObjectStore) -> Iterator[ObjectStore]:
    """Hold the lease of a run; yield its folder. If no other file is left at the end, delete the lock file."""
    lock = Lease(run).take()
    is_empty = False
    try:
        lock.keep()  # if the lease is lost, `guard` raises at the next change
        yield replace(run, guard=lock.assure)
        is_empty = set(run.files()) <= {LOCK}
    finally:
        lock.release(forget=is_empty)


def _remove_files(run: ObjectStore, paths: Collection[str]) -> None:
    """Delete the files in parallel, then the mark; the lock file stays. Raises StoreError."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ddptrain-prune") as pool:
        list(pool.map(run.remove, [path for path in paths if path not in (MARK, LOCK)]))
    run.remove(MARK)


def _download_working_folder(run: ObjectStore, uploads: Uploader, before: Claim | None) -> None:
    """Download a run or sweep into its working folder, unless the last upload came from this folder.

    The folder gets the files to which a resumed run appends, and the newest checkpoint that matches its manifest.
    before: the claim of the previous driver. Raises ResultsError, StoreError.
    """
    folder = uploads.root
    origin = origin_of(folder)
    if origin is not None and before is not None and origin.token == before.token:
        return
    if folder.exists():
        aside = folder.with_name(f"{folder.name}.before-{secrets.token_hex(4)}")
        with results_errors(folder):
            file_ops.publish(folder, aside)
        uploads.notes.append(f"{run.url} was continued by another host; the copy of this host is kept in {aside}")
    _private(folder.parent)
    with results_errors(folder):
        folder.mkdir(mode=0o700)
    try:
        files = run.files()
        for path, objects in joined(files).items():
            if any(fnmatchcase(path, pattern) for pattern in _CONTINUED) and path.count("/") < 2 and is_plain(path):
                run.fetch(objects, folder / path)
        download_newest(run, files, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _private(folder: Path) -> Path:
    """Return the folder, created for this user only if it is missing."""
    with results_errors(folder):
        file_ops.make_private(folder)
    return folder
