"""The runs of a place: a folder of this machine (LocalRuns), or an object store (StoreRuns), with the same methods.

Of a run in a store, readers get local copies of the files that they need; a driver writes a local working folder that
is uploaded meanwhile.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path

from ddptrain import file_ops
from ddptrain.config.wording import shorten
from ddptrain.errors import DdptrainError, RunLocked, RunNotFound, UsageError
from ddptrain.log import Log
from ddptrain.results import ownership
from ddptrain.results.annotations import FILE as ANNOTATIONS
from ddptrain.results.annotations import Annotations, Change, edit_folder, edit_stored
from ddptrain.results.errors import ResultsError, results_errors
from ddptrain.results.layout import (
    BEST,
    INPUTS,
    MANIFEST,
    PRUNED,
    Origin,
    RunLayout,
    files_below,
    origin_of,
    valid_run_id,
)
from ddptrain.results.lookup import RunView, find_checkpoint, find_run, list_runs, load_run
from ddptrain.results.remote.checkpoints import download_checkpoints, download_model, download_newest
from ddptrain.results.remote.lease import LOCK, Claim, StoreLock, claim_from
from ddptrain.results.remote.uploader import Uploader, grows, joined
from ddptrain.results.run_record import RecordError, RunRecord, RunStatus
from ddptrain.results.secure_files import is_own_folder, write_file
from ddptrain.results.tracker_records import RECORDED
from ddptrain.storage.object_store import ObjectStore, open_folder
from ddptrain.storage.store import Listed, is_plain, is_url
from ddptrain.tracking.wandb_files import LINKS

MARK = ".pruned.json"  # in a run of a store whose deletion has begun
_RECORD = "run.json"
_FOLLOW_EVERY_S = 3.0
_THREADS = 16
_LARGEST_CONFIG_BYTES = 1 << 20
_RECORDS = (_RECORD, ANNOTATIONS, f"{RECORDED}/{LINKS}")  # of which a reader always has a copy
_CONTINUED = ("run.json", "sweep.json", "config.yaml", "*.jsonl", "logs/*", f"{INPUTS}/*")
_log = Log(__name__)


class NeededFiles(Enum):
    """The files that a command reads besides run.json, as patterns of paths."""

    NOTHING = ()
    CONFIG = ("config.yaml",)
    SWEEP = ("sweep.json",)
    METRICS = ("metrics.jsonl", "system.jsonl")
    LOGS = ("logs/*",)
    EVENTS = ("events.jsonl", "system.jsonl")
    COMPARISON = ("metrics.jsonl", "system.jsonl", "events.jsonl", "config.yaml", "inputs/*.json")
    REPORT = (
        *("metrics.jsonl", "system.jsonl", "events.jsonl", "config.yaml", "git.diff", "logs/rank-*"),
        *(f"artifacts/*.{kind}" for kind in ("csv", "png", "jpg", "jpeg", "webp", "json")),
    )
    CHECKPOINTS = ("all checkpoints",)
    MODEL = ("config.yaml", "artifacts/*.json", "inputs/*.json")  # and the best checkpoint


class NoUpload:
    """The upload of a run in a folder of this machine: nothing to do."""

    def begin(self, warn: Callable[[str], None], lost: Callable[[DdptrainError], None]) -> None:
        """Do nothing: there are no failures."""

    def flush(self, deadline_s: float) -> str:
        """Do nothing."""
        return ""


RunUpload = NoUpload | Uploader


def open_runs_dir(place: str) -> LocalRuns | StoreRuns:
    """Return the runs of a folder, or of an object store for a URL such as s3://bucket/runs.

    Raises UsageError, StoreError.
    """
    if not is_url(place):
        return LocalRuns(Path(place))
    store = open_folder(place)
    store.check()
    return StoreRuns(store)


def split_run(run: str, place: str) -> tuple[str, str]:
    """Return the runs directory and the name of a run: the parts of `run` if it is a URL, otherwise `place` and `run`.

    Raises RunNotFound if the URL has no name.
    """
    if not is_url(run):
        return place, run
    parent, _, name = run.rstrip("/").rpartition("/")
    if not name or not is_url(f"{parent}/") or parent.endswith(":/"):
        raise RunNotFound(f"{run} is not a run's address; give one like s3://bucket/runs/petnames-20250101-120000-ab12")
    return parent, name


def fetch_config(url: str) -> Path:
    """Return a local copy of a configuration file at a URL such as s3://bucket/runs/ID/best.yaml, of a sweep.

    Raises UsageError if there is no such file; StoreError, ResultsError.
    """
    from platformdirs import user_cache_path

    parent, _, name = url.rpartition("/")
    data = open_folder(parent).read(name, _LARGEST_CONFIG_BYTES) if name else None
    if data is None:
        raise UsageError(f"{shorten(url)}: there is no such file")
    digest = file_ops.sha256(url.encode()).hexdigest()[:16]
    folder = user_cache_path("ddptrain", appauthor=False) / "configs" / digest
    write_file(_private(folder) / name, data)
    return folder / name


# --- A folder of this machine ---


@dataclass(frozen=True, slots=True)
class LocalRuns:
    """The runs in a folder of this machine."""

    folder: Path

    @property
    def where(self) -> str:
        """The folder, for messages."""
        return str(self.folder)

    def inside(self, name: str) -> LocalRuns:
        """Return the trials of a sweep."""
        return LocalRuns(self.folder / name)

    def list(self, need: NeededFiles = NeededFiles.NOTHING, kind: str = "") -> list[RunView]:
        """Return every run of that kind, newest first."""
        return list_runs(self.folder, kind)

    def find(
        self, run: str, need: NeededFiles = NeededFiles.NOTHING, rank: int | None = None, checkpoint: str = BEST
    ) -> RunView:
        """Return the run of that name. Raises RunNotFound."""
        return load_run(find_run(self.folder, run))

    def find_exact(self, run_id: str, need: NeededFiles = NeededFiles.NOTHING) -> RunView | None:
        """Return the run of that id; None if there is none."""
        return load_run(self.folder / run_id) if RunLayout(self.folder / run_id).run_json.is_file() else None

    def annotate(self, run: str, change: Change) -> Annotations:
        """Change the tags and the note of a run; return them. Raises RunNotFound, ResultsError."""
        return edit_folder(find_run(self.folder, run), change)

    def follow(self, view: RunView, rank: int | None, *, numbers: bool = False) -> Callable[[], bool] | None:
        """Return None: the files of the run itself are read."""
        return None

    @contextmanager
    def keeping(self, run_id: str, *, resumed: bool) -> Iterator[RunUpload]:
        """Yield the upload of the run, which does nothing."""
        yield NoUpload()

    # Deletion: the folder is renamed to `.pruned-RUN-TOKEN`, which all readers ignore, before its files are deleted.

    def size_bytes(self, view: RunView) -> int:
        """Return the size of all files of a run."""
        return sum(size for _, size in files_below(view.layout.root))

    def has_checkpoint(self, view: RunView) -> bool:
        """Return whether the run has a checkpoint to resume from."""
        with suppress(RunNotFound, OSError):
            return find_checkpoint(view.layout) is not None
        return False

    def why_foreign(self, view: RunView) -> str:
        """Return why this user must not delete the run, or ""."""
        folder = view.layout.root
        return "a symbolic link" if folder.is_symlink() else "" if is_own_folder(folder) else "of another user"

    def delete(self, chosen: RunView) -> None:
        """Delete a run.

        chosen: the run as it was when the decision was made.

        Raises RunLocked; ResultsError: either nothing is deleted, or the rest is in a folder that readers ignore.
        """
        folder = chosen.layout.root
        aside = folder.with_name(f"{PRUNED}{folder.name[:100]}-{secrets.token_hex(4)}")
        owner = ownership.Owner(chosen.layout.lock_file)
        try:
            owner.take()  # so that no driver can resume it
        except ResultsError:
            if not folder.is_dir():  # another prune was faster
                raise RunLocked(f"run {folder.name} was deleted already") from None
            raise
        try:
            now = load_run(folder, is_ours=True)
            if (now.status, now.record.driver, now.problem) != (chosen.status, chosen.record.driver, ""):
                raise RunLocked(f"run {chosen.run_id} has changed since it was chosen: it is {now.shown_status}")
            with results_errors(folder, "move"):
                file_ops.publish(folder, aside)
            _log.info("run moved aside", run=folder.name, folder=aside)
            self.finish(aside.name)
        finally:
            owner.release()

    def leftovers(self) -> dict[str, int]:
        """Return the sizes in bytes of runs whose deletion was interrupted, by the names of their folders."""
        folders = [path for path in file_ops.entries(self.folder) if path.name.startswith(PRUNED)]
        own = [path for path in sorted(folders) if not path.is_symlink() and is_own_folder(path)]
        return {path.name: sum(size for _, size in files_below(path)) for path in own}

    def finish(self, name: str) -> None:
        """Delete one of `leftovers`. Raises ResultsError."""
        folder = self.folder / name
        with results_errors(folder, "delete"):
            while folder.exists():
                with suppress(FileNotFoundError):  # another prune deletes it at the same time
                    shutil.rmtree(folder)


# --- An object store ---


class StoreRuns:
    """Runs in an object store.

    work: the working folders of runs that drivers of this machine write. copies: what readers have downloaded; a copy
    has the time of the file in the store, whose nanoseconds stand for its version.
    """

    def __init__(self, store: ObjectStore) -> None:
        from platformdirs import user_cache_path, user_state_path

        self.store = store
        slug = re.sub(r"[^A-Za-z0-9]+", "-", store.url)[-40:].strip("-")
        name = f"{slug}-{file_ops.sha256(store.url.encode()).hexdigest()[:8]}"
        self.work = user_state_path("ddptrain", appauthor=False) / "runs" / name
        self.copies = user_cache_path("ddptrain", appauthor=False) / "runs" / name
        self._files: dict[str, dict[str, Listed]] | None = None  # of each run, as they were listed last

    @property
    def folder(self) -> Path:
        """The folder in which a driver creates the folder of a new run."""
        return _private(self.work)

    @property
    def where(self) -> str:
        """The address, for messages."""
        return self.store.url

    def inside(self, name: str) -> StoreRuns:
        """Return the trials of a sweep."""
        return StoreRuns(self.store.below(name))

    def list(self, need: NeededFiles = NeededFiles.NOTHING, kind: str = "") -> list[RunView]:
        """Return every run of that kind, newest first, with copies of the files that are needed."""
        copied = self._copy_all(need)
        return [view for view in list_runs(self.copies, kind) if view.layout.root.name in copied]

    def find(
        self, run: str, need: NeededFiles = NeededFiles.NOTHING, rank: int | None = None, checkpoint: str = BEST
    ) -> RunView:
        """Return the run of that name, with a copy of the files that are needed. Raises RunNotFound.

        checkpoint: the one that NeededFiles.MODEL needs: best, latest, or a name such as step-100.
        """
        if not (valid_run_id(run) and self._copy(run)):
            self._copy_all()
        folder = find_run(self.copies, run)
        if folder.parent == self.copies:
            self._copy(folder.name, _wanted(need, rank))
            if need is NeededFiles.MODEL:
                inside = self.store.below(folder.name)
                download_model(inside, folder, inside.files(), checkpoint)
            elif need is NeededFiles.CHECKPOINTS:
                download_checkpoints(self.store.below(folder.name), folder)
        return load_run(folder)

    def find_exact(self, run_id: str, need: NeededFiles = NeededFiles.NOTHING) -> RunView | None:
        """Return the run of that id, with a copy of the files that are needed; None if there is none.

        Unlike find(), it asks for no other run, and leaves the copies of others as they are. Raises StoreError.
        """
        return load_run(self.copies / run_id) if self._copy(run_id, need.value) else None

    def annotate(self, run: str, change: Change) -> Annotations:
        """Change the tags and the note of a run; return them. Raises RunNotFound, ResultsError, StoreError."""
        folder = self.find(run).layout.root
        if folder.parent != self.copies:
            return edit_folder(folder, change)
        return edit_stored(self.store.below(folder.name), change)

    def follow(self, view: RunView, rank: int | None, *, numbers: bool = False) -> Callable[[], bool] | None:
        """Return a function that downloads new log lines every few seconds, and returns whether the run is running.

        numbers: also new lines of the events, the metrics, and the use of hosts.
        """
        folder, fetched_at = view.layout.root, float("-inf")
        if folder.parent != self.copies:
            return None
        wanted = (*_wanted(NeededFiles.LOGS, rank), *(("*.jsonl",) if numbers else ()))

        def is_running() -> bool:
            nonlocal fetched_at
            if time.monotonic() - fetched_at >= _FOLLOW_EVERY_S:
                self._copy(folder.name)
                running = load_run(folder).is_running  # before the last lines are read
                self._copy(folder.name, wanted)
                fetched_at = time.monotonic()
                return running
            return True

        return is_running

    @contextmanager
    def keeping(self, run_id: str, *, resumed: bool) -> Iterator[Uploader]:
        """Hold the run's lock for the block; yield the upload of its working folder, which a resumed run has.

        Raises RunLocked; UsageError if the id is taken; StoreError, ResultsError.
        """
        run = self.store.below(run_id)
        if not resumed and run.read(_RECORD) is not None:
            raise UsageError(f"run {run_id} exists already in {self.store.url}; choose another --run-id")
        lock = StoreLock(run)
        before = lock.take()
        uploads = Uploader(replace(run, guard=lock.assure), self.work / run_id, lock.claim.token)
        try:
            lock.keep(uploads.lose)
            if resumed:
                _download_working_folder(run, uploads, before)
                Origin(run.url, lock.claim.token).mark(uploads.root)
            with closing(uploads):
                yield uploads
        finally:
            lock.release(forget=not resumed and not uploads.begun)

    # Copies for readers.

    def _copy_all(self, need: NeededFiles = NeededFiles.NOTHING) -> Collection[str]:
        """Copy what has changed of the records of all runs; return the names of the runs, from one listing."""
        self._files = {}
        for path, file in self.store.files().items():
            name, _, inside = path.partition("/")
            if inside and valid_run_id(name):
                self._files.setdefault(name, {})[inside] = file
        Origin(self.store.url).mark(_private(self.copies))
        for folder in self.copies.iterdir():
            if folder.is_dir() and _RECORD not in self._files.get(folder.name, {}):
                shutil.rmtree(folder, ignore_errors=True)
        files = self._files
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="ddptrain-copies") as pool:
            copied = pool.map(lambda name: self._copy(name, need.value, files[name]), files)
            return {name for name, is_there in zip(files, copied, strict=True) if is_there}

    def _copy(self, name: str, wanted: Collection[str] = (), files: Mapping[str, Listed] | None = None) -> bool:
        """Copy the files of a run that match a pattern of `wanted`; its records always. False if it does not exist.

        files: those of the run, if they are known.
        """
        run = self.store.below(name)
        parts = joined(run.files() if files is None else files)
        if _RECORD not in parts:
            return False
        folder = _private(self.copies / name)
        for path, objects in parts.items():
            if path in _RECORDS or any(fnmatchcase(path.lower(), pattern) for pattern in wanted):
                _fetch_changed(run, path, objects, folder / path)
        if ANNOTATIONS not in parts:
            (folder / ANNOTATIONS).unlink(missing_ok=True)
        alive = False
        with suppress(OSError, RecordError):
            if RunRecord.from_json(file_ops.read_regular(folder / _RECORD)).status == RunStatus.RUNNING:
                claim = claim_from(run.read(LOCK))
                alive = claim is not None and claim.is_held()
        sizes = {path: sum(each.size_bytes for each in objects.values()) for path, objects in parts.items()}
        listed = {path: size for path, size in sizes.items() if path.startswith(("logs/", "artifacts/"))}
        origin = Origin(run.url, alive=alive, files=listed)
        if origin != origin_of(folder):
            origin.mark(folder)
        return True

    # Deletion: a mark is written, and run.json is deleted before the other files.

    def _inside(self, name: str) -> Mapping[str, Listed]:
        """Return the files of a run, from the last listing of all runs if there was one."""
        return self.store.below(name).files() if self._files is None else self._files.get(name, {})

    def size_bytes(self, view: RunView) -> int:
        """Return the size of all files of a run."""
        return sum(file.size_bytes for file in self._inside(view.layout.root.name).values())

    def has_checkpoint(self, view: RunView) -> bool:
        """Return whether the run has a checkpoint to resume from."""
        paths = self._inside(view.layout.root.name)
        return any(path.startswith("checkpoints/") and path.endswith(f"/{MANIFEST}") for path in paths)

    def why_foreign(self, view: RunView) -> str:
        """Return "": whoever may write to the store may delete its runs."""
        return ""

    def delete(self, chosen: RunView) -> None:
        """Delete a run, and its working folder on this machine.

        chosen: the run as it was when the decision was made. Raises RunLocked, UsageError, StoreError.
        """
        if chosen.layout.root.parent != self.copies:
            raise UsageError(f"{chosen.run_id} is a trial of a sweep in a store: only whole runs can be deleted there")
        name = chosen.layout.root.name
        with _lease(self.store.below(name)) as run:
            now = None
            with suppress(RecordError):
                now = RunRecord.from_json(run.read(_RECORD) or b"")
            if now is None or now.driver != chosen.record.driver:
                raise RunLocked(f"run {chosen.run_id} has changed since it was chosen")
            run.write(MARK, (json.dumps({"since": time.time()}) + "\n").encode())
            run.remove(_RECORD)
            _log.info("run.json deleted", run=name, store=run.url)
            _remove_files(run, run.files())
            shutil.rmtree(self.work / name, ignore_errors=True)  # left by a driver that was killed

    def leftovers(self) -> dict[str, int]:
        """Return the sizes in bytes of what remains of runs whose deletion was interrupted, by their names."""
        if self._files is None:
            self._copy_all()
        interrupted = {run: files for run, files in (self._files or {}).items() if _is_interrupted(files)}
        return {run: sum(file.size_bytes for file in interrupted[run].values()) for run in sorted(interrupted)}

    def finish(self, name: str) -> None:
        """Delete one of `leftovers`. Raises RunLocked, StoreError."""
        with _lease(self.store.below(name)) as run:
            if _is_interrupted(files := run.files()):
                _remove_files(run, files)


RunsDir = LocalRuns | StoreRuns


def _wanted(need: NeededFiles, rank: int | None) -> tuple[str, ...]:
    return (f"logs/rank-{rank}.log",) if need is NeededFiles.LOGS and rank is not None else need.value


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
    if is_plain(path):
        run.fetch(objects, target, have_bytes, time_ns)


def _is_interrupted(files: Collection[str]) -> bool:
    return MARK in files and _RECORD not in files


@contextmanager
def _lease(run: ObjectStore) -> Iterator[ObjectStore]:
    """Hold the lease of a run; yield its folder. If no other file is left at the end, delete the lock file."""
    lock = StoreLock(run)
    lock.take()
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
