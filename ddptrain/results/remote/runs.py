"""Runs in an object store: readers get local copies; a driver writes a local working folder that is uploaded."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from ddptrain.config.wording import shorten
from ddptrain.errors import RunNotFound, UsageError
from ddptrain.file_ops import make_private, publish, sha256
from ddptrain.results.annotations import FILE as ANNOTATIONS
from ddptrain.results.annotations import Annotations, Change, edit_folder, edit_stored
from ddptrain.results.checkpoints.verification import verify
from ddptrain.results.errors import CheckpointDamaged, results_errors
from ddptrain.results.layout import BEST, INPUTS, LATEST, MANIFEST, Origin, origin_of, step_name, step_of, valid_run_id
from ddptrain.results.lookup import RunView, find_run, list_runs, load_run
from ddptrain.results.remote.checkpoint_upload import CHECKPOINTS, parse_stored, stored_name, without_stored_as
from ddptrain.results.remote.lease import LOCK, Claim, StoreLock, claim_from
from ddptrain.results.remote.upload import StoreUpload
from ddptrain.results.run_record import RecordError, RunRecord, RunStatus
from ddptrain.results.run_store import LocalRuns, NeededFiles
from ddptrain.results.secure_files import read_bytes, write_file
from ddptrain.results.tracker_records import RECORDED
from ddptrain.storage.remote_folder import RemoteFolder, is_plain, is_url
from ddptrain.storage.store import Listed
from ddptrain.tracking.wandb.wandb_folders import LINKS

AUTO = "auto"
_RECORD = "run.json"
_VERSIONS = ".fetched.json"  # of a reader's copy: path -> the version of the file that was downloaded
_FOLLOW_EVERY_S = 3.0
_READERS = 8  # runs whose files are downloaded at a time
_LARGEST_CONFIG_BYTES = 1 << 20
_CONTINUED = ("run.json", "sweep.json", "config.yaml", "events.jsonl", "metrics.jsonl", "system.jsonl")


def open_runs_dir(place: str) -> LocalRuns | StoreRuns:
    """Return the runs of a folder, or of an object store for a URL such as s3://bucket/runs.

    Raises UsageError, StoreError.
    """
    if not is_url(place):
        return LocalRuns(Path(place))
    store = RemoteFolder.open(place)
    store.check()
    return StoreRuns(store)


class StoreRuns:
    """Runs in an object store.

    work: the working folders of runs that drivers of this machine write. copies: what readers have downloaded.
    """

    def __init__(self, store: RemoteFolder) -> None:
        from platformdirs import user_cache_path, user_state_path

        self.store = store
        slug = re.sub(r"[^A-Za-z0-9]+", "-", store.url)[-40:].strip("-")
        name = f"{slug}-{sha256(store.url.encode()).hexdigest()[:8]}"
        self.work = user_state_path("ddptrain", appauthor=False) / "runs" / name
        self.copies = user_cache_path("ddptrain", appauthor=False) / "runs" / name

    @property
    def folder(self) -> Path:
        """The folder in which a driver creates the folder of a new run."""
        return _private(self.work)

    def list(self, need: NeededFiles = NeededFiles.NOTHING, kind: str = "") -> list[RunView]:
        """Return every run of that kind, newest first, with copies of the files that are needed."""
        files = self._refresh()
        views = [view for view in list_runs(self.copies, kind) if view.layout.root.name in files]
        if need is not NeededFiles.NOTHING:

            def copy(view: RunView) -> None:
                self._copy_files(view.layout.root, need, None, files=files[view.layout.root.name])

            with ThreadPoolExecutor(_READERS, thread_name_prefix="ddptrain-copies") as pool:
                list(pool.map(copy, views))
        return views

    def find(
        self, run: str, need: NeededFiles = NeededFiles.NOTHING, rank: int | None = None, checkpoint: str = BEST
    ) -> RunView:
        """Return the run of that name, with a copy of the files that are needed. Raises RunNotFound.

        checkpoint: the one that NeededFiles.MODEL needs: best, latest, or a name such as step-100.
        """
        if not (valid_run_id(run) and self._copy_records([run])):
            self._refresh()
        folder = find_run(self.copies, run)
        if folder.parent == self.copies:
            self._copy_files(folder, need, rank, checkpoint)
        return load_run(folder)

    def find_exact(self, run_id: str, need: NeededFiles) -> RunView | None:
        """Return the run of that id, with a copy of the files that are needed; None if there is none.

        Unlike find(), it asks for no other run, and leaves the copies of others as they are. Raises StoreError.
        """
        if not self._copy_records([run_id]):
            return None
        self._copy_files(self.copies / run_id, need, None)
        return load_run(self.copies / run_id)

    def annotate(self, run: str, change: Change) -> Annotations:
        """Change the tags and the note of a run; return them. Raises RunNotFound, ResultsError, StoreError."""
        folder = self.find(run).layout.root
        if folder.parent != self.copies:
            return edit_folder(folder, change)
        changed = edit_stored(self.store.below(folder.name), change)
        _write_changed(folder / ANNOTATIONS, changed.to_json())
        return changed

    def follow(self, view: RunView, rank: int | None, *, numbers: bool = False) -> Callable[[], bool] | None:
        """Return a function that downloads new log lines every few seconds, and returns whether the run is running.

        numbers: also new lines of the events, the metrics, and the use of hosts.
        """
        folder, fetched_at = view.layout.root, float("-inf")
        if folder.parent != self.copies:
            return None

        def is_running() -> bool:
            nonlocal fetched_at
            if time.monotonic() - fetched_at >= _FOLLOW_EVERY_S:
                self._copy_records([folder.name])
                running = load_run(folder).is_running
                self._append_new(folder, rank, numbers=numbers)
                fetched_at = time.monotonic()
                return running
            return True

        return is_running

    def candidates(self, name: str, which: str, run_id: str | None = None) -> Path:
        """Return the folder in which to choose the run to resume; it has the records, and the chosen run's config."""
        if which == AUTO and run_id is not None:  # other runs do not matter, and other threads may read their copies
            chosen = [self.copies / run_id] if self._copy_records([run_id]) else []
            if not chosen:
                shutil.rmtree(self.copies / run_id, ignore_errors=True)
            Origin(self.store.url).mark(_private(self.copies))
        elif which != AUTO:
            self._refresh()
            chosen = [find_run(self.copies, which)]
        else:
            self._refresh()
            chosen = [view.layout.root for view in list_runs(self.copies) if view.record.name == name][:1]
        names = [folder.name for folder in chosen if folder.parent == self.copies]
        for path, data in self.store.read_all([f"{name}/config.yaml" for name in names]).items():
            _write_changed(self.copies / path, data)
        return self.copies

    @contextmanager
    def keeping(self, run_id: str, *, resumed: bool) -> Iterator[StoreUpload]:
        """Hold the run's lock for the block; yield the upload of its working folder, which a resumed run has.

        Raises RunLocked; UsageError if the id is taken; StoreError, ResultsError.
        """
        run = self.store.below(run_id)
        if not resumed and run.read("run.json") is not None:
            raise UsageError(f"run {run_id} exists already in {self.store.url}; choose another --run-id")
        lock = StoreLock(run)
        before = lock.take()
        uploads = StoreUpload(replace(run, guard=lock.assure), self.work / run_id, lock.claim.token)
        try:
            lock.keep(uploads.lose)
            if resumed:
                download_working_folder(run, uploads, before, download_run)
                Origin(run.url, lock.claim.token).mark(uploads.root)
            with uploads:
                yield uploads
        finally:
            lock.release(forget=not resumed and not uploads.begun)

    # Copies for readers.

    def _refresh(self) -> dict[str, dict[str, Listed]]:
        """Copy what has changed of the records of all runs; return the files of each run, from one listing."""
        files: dict[str, dict[str, Listed]] = {}
        for path, file in self.store.files().items():
            name, _, inside = path.partition("/")
            files.setdefault(name, {})[inside] = file
        files = {name: inside for name, inside in files.items() if valid_run_id(name) and _RECORD in inside}
        names_in_store = self._copy_records(files, files)
        _private(self.copies)
        Origin(self.store.url).mark(self.copies)
        for folder in self.copies.iterdir():
            if folder.is_dir() and folder.name not in names_in_store:
                shutil.rmtree(folder, ignore_errors=True)
        return {name: files[name] for name in names_in_store}

    def _copy_records(self, names: Iterable[str], listed: Mapping[str, Mapping[str, Listed]] | None = None) -> set[str]:
        """Copy run.json and the annotations of each run; return the names of the runs that have a run.json.

        listed: the files of each run, if they are known: what the copy has is not read again.
        """
        names = list(names)
        records = self._read_each(names, _RECORD, listed)
        annotated = self._read_each([PurePosixPath(path).parent.name for path in records], ANNOTATIONS, listed)
        running = [PurePosixPath(path).parent.name for path, data in records.items() if _is_running(data)]
        claims = self.store.read_all([f"{name}/{LOCK}" for name in running])
        for path, data in records.items():
            name = PurePosixPath(path).parent.name
            folder = _private(self.copies / name)
            _write_changed(folder / _RECORD, data)
            if (annotations := annotated.get(f"{name}/{ANNOTATIONS}")) is not None:
                _write_changed(folder / ANNOTATIONS, annotations)
            else:
                (folder / ANNOTATIONS).unlink(missing_ok=True)
            claim = claim_from(claims.get(f"{name}/{LOCK}"))
            known = origin_of(folder)
            alive = claim is not None and claim.is_held()
            origin = Origin(f"{self.store.url}/{name}", alive=alive, files=known.files if known else {})
            if origin != known:
                origin.mark(folder)
            if listed is not None:
                _note_versions(folder, listed[name])
        return {PurePosixPath(path).parent.name for path in records}

    def _read_each(
        self, names: Iterable[str], file: str, listed: Mapping[str, Mapping[str, Listed]] | None
    ) -> dict[str, bytes]:
        """Return a small file of each run that has it, by its path; from the copy if it has the listed version."""
        if listed is None:
            return self.store.read_all([f"{name}/{file}" for name in names])
        there = {name: listed[name][file] for name in names if file in listed[name]}
        copied = {name: _copied(self.copies / name, file, there[name]) for name in there}
        read = self.store.read_all([f"{name}/{file}" for name, data in copied.items() if data is None])
        return read | {f"{name}/{file}": data for name, data in copied.items() if data is not None}

    def _copy_files(
        self,
        folder: Path,
        need: NeededFiles,
        rank: int | None,
        checkpoint: str = BEST,
        files: Mapping[str, Listed] | None = None,
    ) -> None:
        """Copy the files that are needed. `files`: those of the run, if they are known."""
        run = self.store.below(folder.name)
        files = {path: file for path, file in (files or run.files()).items() if is_plain(path)}
        origin = origin_of(folder)
        assert origin is not None
        listed = {path: file.size_bytes for path, file in files.items() if path.startswith(("logs/", "artifacts/"))}
        Origin(origin.url, alive=origin.alive, files=listed).mark(folder)
        if need is NeededFiles.MODEL:
            download_model(run, folder, files, checkpoint)
        if need is NeededFiles.CHECKPOINTS:
            download_checkpoints(run, folder)
        _fetch_changed(run, folder, {path: file for path, file in files.items() if _is_needed(path, need, rank)})

    def _append_new(self, folder: Path, rank: int | None, *, numbers: bool = False) -> None:
        run = self.store.below(folder.name)
        for path, file in run.files("" if numbers else "logs").items():
            target = folder / path
            is_log = path.startswith("logs/") and is_plain(path) and _is_needed(path, NeededFiles.LOGS, rank)
            if not (is_log or path in _NUMBERS):
                continue
            local_size = target.stat().st_size if target.exists() else 0
            if file.size_bytes < local_size:  # another driver has started it again
                run.fetch(path, target)
            elif file.size_bytes > local_size:
                data = run.read_from(path, local_size)
                target.parent.mkdir(exist_ok=True)
                with target.open("ab") as log:
                    log.write(data)


def download_working_folder(
    run: RemoteFolder,
    uploads: StoreUpload,
    before: Claim | None,
    download: Callable[[RemoteFolder, Path, Callable[[str], None]], None],
) -> None:
    """Download a run or sweep into its working folder, unless the last upload came from this folder.

    before: the claim of the previous driver. Raises ResultsError, StoreError.
    """
    folder = uploads.root
    origin = origin_of(folder)
    if origin is not None and before is not None and origin.token == before.token:
        return
    if folder.exists():
        aside = folder.with_name(f"{folder.name}.before-{secrets.token_hex(4)}")
        with results_errors(folder):
            publish(folder, aside)
        uploads.warn(f"{run.url} was continued by another host; the copy of this host is kept in {aside}")
    _private(folder.parent)
    with results_errors(folder):
        folder.mkdir(mode=0o700)
    try:
        download(run, folder, uploads.warn)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


_NEEDED_FILES = {
    NeededFiles.METRICS: ("metrics.jsonl", "system.jsonl"),
    NeededFiles.EVENTS: ("events.jsonl", "system.jsonl"),
    NeededFiles.COMPARISON: ("metrics.jsonl", "config.yaml", "events.jsonl", "system.jsonl"),
    NeededFiles.REPORT: ("metrics.jsonl", "events.jsonl", "system.jsonl", "config.yaml", "git.diff"),
    NeededFiles.MODEL: ("config.yaml",),
}
_NUMBERS = ("events.jsonl", "metrics.jsonl", "system.jsonl")
_IN_REPORT = (".csv", ".png", ".jpg", ".jpeg", ".webp", ".json")


def _is_needed(path: str, need: NeededFiles, rank: int | None) -> bool:
    if path == f"{RECORDED}/{LINKS}" or path in _NEEDED_FILES.get(need, ()):
        return True
    if need is NeededFiles.LOGS:
        return path.startswith("logs/") and (rank is None or path == f"logs/rank-{rank}.log")
    if need is NeededFiles.COMPARISON:
        return path.startswith("inputs/") and path.endswith(".json")
    if need is NeededFiles.REPORT:
        in_report = path.startswith("artifacts/") and path.lower().endswith(_IN_REPORT)
        return in_report or path.startswith("logs/rank-")
    return need is NeededFiles.MODEL and path.startswith(("artifacts/", "inputs/")) and path.endswith(".json")


def _fetch_changed(run: RemoteFolder, folder: Path, files: Mapping[str, Listed]) -> None:
    """Download the files that have changed since the last download."""
    versions = _versions(folder)
    for path, file in files.items():
        target = folder / path
        local_size = target.stat().st_size if target.is_file() else -1
        if local_size != file.size_bytes or not file.version or versions.get(path) != file.version:
            run.fetch(path, target)
            versions[path] = file.version
            write_file(folder / _VERSIONS, json.dumps(versions).encode())


def _versions(folder: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        return dict(json.loads((folder / _VERSIONS).read_bytes()))
    return {}


def _copied(folder: Path, file: str, listed: Listed) -> bytes | None:
    """Return the copy of a record; None if it is not that of the listed version."""
    with suppress(OSError):
        data = read_bytes(folder / file)
        if listed.version and _versions(folder).get(file) == _version_of(data, listed):
            return data
    return None


def _note_versions(folder: Path, listed: Mapping[str, Listed]) -> None:
    """Note the versions of the records that have just been copied."""
    before = _versions(folder)
    here = [name for name in (_RECORD, ANNOTATIONS) if name in listed and (folder / name).is_file()]
    noted = before | {name: _version_of(read_bytes(folder / name), listed[name]) for name in here}
    if noted != before:
        write_file(folder / _VERSIONS, json.dumps(noted).encode())


def _version_of(data: bytes, listed: Listed) -> str:
    # With the content: another process may replace the copy between two writes of this one.
    return f"{listed.version} {sha256(data).hexdigest()}"


def _is_running(data: bytes) -> bool:
    try:
        return RunRecord.from_json(data).status == RunStatus.RUNNING
    except RecordError:
        return False


def _write_changed(path: Path, data: bytes) -> None:
    try:
        if path.read_bytes() == data:
            return
    except OSError:
        pass
    write_file(path, data)


def _private(folder: Path) -> Path:
    """Return the folder, created for this user only if it is missing."""
    with results_errors(folder):
        make_private(folder)
    return folder


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
    data = RemoteFolder.open(parent).read(name, _LARGEST_CONFIG_BYTES) if name else None
    if data is None:
        raise UsageError(f"{shorten(url)}: there is no such file")
    folder = user_cache_path("ddptrain", appauthor=False) / "configs" / sha256(url.encode()).hexdigest()[:16]
    write_file(_private(folder) / name, data)
    return folder / name


RunsDir = LocalRuns | StoreRuns


def download_run(run: RemoteFolder, folder: Path, warn: Callable[[str], None]) -> None:
    """Download the files that a resumed run appends to, and the newest checkpoint that matches its manifest.

    Of older checkpoints only the manifests are downloaded, so that `checkpoint.keep` counts and later deletes them.
    `warn` is called for each damaged checkpoint. Raises ResultsError, StoreError.
    """
    paths = run.files()
    for path in paths:
        is_below = path.startswith(("logs/", f"{INPUTS}/")) and path.count("/") == 1 and "\\" not in path
        if path in _CONTINUED or is_below:
            run.fetch(path, folder / path)
    manifests = _manifests(run, paths)
    for step in sorted(manifests, reverse=True):
        try:
            _fetch(run, folder, step, manifests[step])
        except CheckpointDamaged as error:
            warn(f"checkpoint {step_name(step)} of {run.url} is skipped: {error}")
            shutil.rmtree(folder / CHECKPOINTS / step_name(step), ignore_errors=True)
            continue
        for other in sorted(manifests):
            if other < step:
                _write_manifest(folder, other, manifests[other])
        return


def download_checkpoints(run: RemoteFolder, folder: Path) -> None:
    """Download the checkpoints that match their manifests.

    One that the folder has already is not downloaded again. Raises ResultsError, StoreError.
    """
    for step, manifest in _manifests(run, run.files(CHECKPOINTS)).items():
        if not _is_here(folder, step, manifest):
            try:
                _fetch(run, folder, step, manifest)
            except CheckpointDamaged:
                shutil.rmtree(folder / CHECKPOINTS / step_name(step), ignore_errors=True)


def download_model(run: RemoteFolder, folder: Path, paths: Iterable[str], which: str = BEST) -> None:
    """Download a checkpoint, unless the folder has it: best (or else the newest), latest, or a name such as step-100.

    Raises RunNotFound if there is none; ResultsError, StoreError.
    """
    manifests = _manifests(run, paths)
    if not manifests:
        raise RunNotFound(f"run {folder.name} has no checkpoint in {run.url}")
    step = step_of(which)
    if step is None:
        step = _pointed_at(run, (BEST, LATEST) if which == BEST else (LATEST,), manifests)
    elif step not in manifests:
        steps = ", ".join(step_name(step) for step in sorted(manifests))
        raise RunNotFound(f"run {folder.name} has no checkpoint {which} in {run.url}; it has {steps}")
    if not _is_here(folder, step, manifests[step]):
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        _fetch(run, folder, step, manifests[step])
    for name in (BEST, LATEST):
        write_file(folder / CHECKPOINTS / name, f"{step_name(step)}\n".encode())


def _is_here(folder: Path, step: int, manifest: Mapping[str, Any]) -> bool:
    try:
        local = json.loads((folder / CHECKPOINTS / step_name(step) / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return bool(local == without_stored_as(manifest))


def _pointed_at(run: RemoteFolder, pointers: Sequence[str], steps: Collection[int]) -> int:
    """Return the step of the first pointer whose checkpoint exists; the newest of `steps` if there is none."""
    contents = run.read_all([f"{CHECKPOINTS}/{name}" for name in pointers])
    texts = (contents.get(f"{CHECKPOINTS}/{name}", b"").decode(errors="replace").strip() for name in pointers)
    return next((step for text in texts if (step := step_of(text)) in steps and step is not None), max(steps))


def _manifests(run: RemoteFolder, paths: Iterable[str]) -> dict[int, dict[str, Any]]:
    """Return the manifests of a run's checkpoints, by step."""
    steps = {
        path: step
        for path in paths
        if path.startswith(f"{CHECKPOINTS}/") and path.count("/") == 2 and path.endswith(f"/{MANIFEST}")
        if (step := step_of(path.split("/")[1])) is not None
    }
    manifests = {steps[path]: parse_stored(data) for path, data in run.read_all(list(steps)).items()}
    return {step: manifest for step, manifest in manifests.items() if manifest is not None}


def _fetch(run: RemoteFolder, folder: Path, step: int, manifest: Mapping[str, Any]) -> None:
    """Download a checkpoint's files, then its manifest, and compare them. Raises CheckpointDamaged, StoreError."""
    target = folder / CHECKPOINTS / step_name(step)
    files = run.files(f"{CHECKPOINTS}/{step_name(step)}")
    for file in manifest["files"]:
        path = f"{CHECKPOINTS}/{step_name(step)}/{stored_name(manifest, file['name'])}"
        if path not in files:
            raise CheckpointDamaged(f"{path} is missing")
        run.fetch(path, target / file["name"])
    _write_manifest(folder, step, manifest)
    verify(target)


def _write_manifest(folder: Path, step: int, manifest: Mapping[str, Any]) -> None:
    target = folder / CHECKPOINTS / step_name(step)
    with results_errors(target):
        target.mkdir(parents=True, exist_ok=True)
    write_file(target / MANIFEST, (json.dumps(without_stored_as(manifest), indent=2) + "\n").encode())
