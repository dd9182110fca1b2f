"""Sends the missing parts of runs to W&B: of offline runs, and of online runs that ended before all was sent.

`wandb sync` sends each part of a W&B run (wandb_folders.py); then the run's checkpoints and tables are logged from the
run directory. A part that was sent is marked, and skipped the next time. One that could not be sent stays.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ddptrain.errors import RunLocked, UsageError
from ddptrain.file_ops import temp_folder
from ddptrain.results import ownership
from ddptrain.results.checkpoints.verification import VerifiedCheckpoint, verify
from ddptrain.results.errors import CheckpointDamaged, ResultsError, results_errors
from ddptrain.results.layout import ARTIFACTS as ARTIFACTS_FOLDER
from ddptrain.results.layout import MANIFEST, RunLayout, checkpoint_folders
from ddptrain.results.lookup import RunView, load_run
from ddptrain.results.recorded_config import parsed_config
from ddptrain.results.remote.checkpoints import download_checkpoints
from ddptrain.results.remote.lease import StoreLock
from ddptrain.results.secure_files import append, is_own_folder, make_folder, read_bytes, write_file
from ddptrain.results.tracker_records import RECORDED, TEMPORARY, WANDB, wandb_parts
from ddptrain.storage.remote_folder import RemoteFolder, is_plain
from ddptrain.storage.store import StoreError
from ddptrain.tracking.wandb.credentials import BASE_URL, KEY, access_to
from ddptrain.tracking.wandb.sync_command import RunArtifacts, SyncOutput, WandbProcesses, sync_environment
from ddptrain.tracking.wandb.wandb_folders import (
    ARTIFACTS,
    LINKS,
    SENT,
    STATE_FILES,
    SYNCED,
    UNSENT,
    RunPart,
    links_in,
    unsent_parts,
)

_LOCK = ".sync.lock"


@dataclass(frozen=True, slots=True)
class SyncResult:
    """The result for one run: how many parts were sent, how many still wait, and why.

    `problem` is "" if nothing went wrong. `skipped` is the reason if the run was skipped.
    """

    run_id: str
    sent: int = 0
    waiting: int = 0
    problem: str = ""
    skipped: str = ""

    @property
    def summary(self) -> str:
        """The result on one line."""
        if self.skipped:
            return f"{self.run_id}: skipped, {self.skipped}"
        if self.problem:
            parts = f"{self.waiting} of {self.sent + self.waiting} W&B runs " if self.waiting else ""
            return f"{self.run_id}: {parts}not sent: {self.problem}"
        return f"{self.run_id}: " + (f"{self.sent} sent to W&B" if self.sent else "nothing to send to W&B")


class _Skipped(Exception):
    """The run must not be sent now."""


class _NotSent(Exception):
    """Something prevents sending the run."""


def sync_runs(
    views: Sequence[RunView], timeout_s: float, tell: Callable[[SyncResult], None], notice: Callable[[str], None]
) -> bool:
    """Send all runs, within `timeout_s` together. Return whether everything that should be sent was sent.

    `notice` gets a line when the server takes long.
    """
    deadline = time.monotonic() + timeout_s
    all_well = True
    for view in views:
        result = sync_run(view, os.environ, deadline, notice)
        tell(result)
        all_well = all_well and not result.problem
    return all_well


def sync_run(
    view: RunView, environ: Mapping[str, str], deadline: float, notice: Callable[[str], None] = print
) -> SyncResult:
    """Send the missing parts of a run, until `deadline` (monotonic). Raises UsageError if there is no API key."""
    if view.layout.is_original:
        return _result(view, lambda: _sync_local(view, environ, deadline, notice))
    with temp_folder("ddptrain-sync-") as folder:
        stored = StoredWandbRun(RemoteFolder.open(view.layout.where), folder / "run")
        local_view = RunView(stored.layout, view.record)
        return _result(local_view, lambda: _sync_stored(view, local_view, stored, environ, deadline, notice))


def _result(view: RunView, sync: Callable[[], SyncResult]) -> SyncResult:
    try:
        return sync()
    except _Skipped as reason:
        return SyncResult(view.run_id, skipped=str(reason))
    except RunLocked:
        return SyncResult(view.run_id, skipped="another process is sending it")
    except (_NotSent, ResultsError, StoreError) as error:
        return SyncResult(view.run_id, waiting=len(_waiting(view)), problem=str(error))


def _sync_local(
    view: RunView, environ: Mapping[str, str], deadline: float, notice: Callable[[str], None]
) -> SyncResult:
    if not _waiting(view):
        return SyncResult(view.run_id)
    if not is_own_folder(view.layout.root):
        raise _Skipped("it belongs to another user")
    view = load_run(view.layout.root.absolute())  # absolute: wandb's command runs in another folder
    _check_ended(view)
    processes = _processes(view, environ, notice)
    held = ownership.take(_recorded_folder(view.layout) / _LOCK)
    try:
        return _send_all(view, processes, deadline)
    finally:
        os.close(held)


def _sync_stored(
    view: RunView,
    local_view: RunView,
    stored: StoredWandbRun,
    environ: Mapping[str, str],
    deadline: float,
    notice: Callable[[str], None],
) -> SyncResult:
    """Send a run of an object store, whose files are fetched to the folder of `local_view`."""
    stored.refresh()
    if not _waiting(local_view):
        return SyncResult(view.run_id)
    _check_ended(view)
    processes = _processes(local_view, environ, notice)
    lock_file = StoreLock(stored.store.below(RECORDED))
    lock_file.take()
    # If the lock is lost, another process sends the same rows: the server recognizes them by their steps.
    lock_file.keep(lambda error: None)
    try:
        stored.refresh()  # another process may have sent it before we had the lock
        try:
            stored.fetch(_waiting(local_view), deadline)
        except TimeoutError:
            raise _NotSent("the time limit (--timeout) was over before they were fetched") from None
        try:
            return _send_all(local_view, processes, deadline)
        finally:
            stored.upload_states()
    finally:
        lock_file.release(forget=True)


def _check_ended(view: RunView) -> None:
    """Raise _Skipped unless the run's driver is known to have ended."""
    if view.is_running:
        raise _Skipped("it is running")


def _recorded_folder(layout: RunLayout) -> Path:
    """The folder that W&B records into. Raises ResultsError if it, or tracking/, is not a folder of this user."""
    folder = layout.root / RECORDED
    for each in (layout.tracking_dir, folder):
        make_folder(each)
    return folder


def _waiting(view: RunView) -> list[RunPart]:
    """Return the parts that the server lacks."""
    return unsent_parts(wandb_parts(view.layout, view.record))


def _processes(view: RunView, environ: Mapping[str, str], notice: Callable[[str], None]) -> WandbProcesses:
    """Return what sends the run with the user's key.

    Raises _NotSent if the run names a server that the user has not chosen; UsageError if there is no API key.
    """
    named = str(view.record.tracking.get("wandb", {}).get("base_url", ""))
    access = access_to(named, environ)
    if access is None:
        advice = f"set WANDB_BASE_URL={shlex.quote(named)} if your key is to go there"
        raise _NotSent(f"they are for {named}: {advice}")
    if not access.has_credentials:
        raise UsageError("there is no API key of W&B: set WANDB_API_KEY, or run `wandb login`")
    chosen = {name: value for name, value in ((KEY, access.key), (BASE_URL, access.base_url)) if value}
    return WandbProcesses(sync_environment(environ) | chosen, lambda text: notice(f"{view.run_id}: {text}"))


def _send_all(view: RunView, processes: WandbProcesses, deadline: float) -> SyncResult:
    """Send the parts of each W&B run, and then its artifacts."""
    waiting = _waiting(view)
    problem = ""
    for target in dict.fromkeys(part.target for part in waiting):
        try:
            _send(view, [part for part in waiting if part.target == target], processes, deadline)
        except _NotSent as error:
            problem = problem or str(error)
    left = len(_waiting(view))
    return SyncResult(view.run_id, len(waiting) - left, left, problem)


def _send(view: RunView, parts: Sequence[RunPart], processes: WandbProcesses, deadline: float) -> None:
    """Send these parts of one W&B run, the oldest first, and its artifacts. Raises _NotSent."""
    of_run = [part for part in wandb_parts(view.layout, view.record) if part.target == parts[0].target]
    was_overtaken = any(part.sent for part in of_run[of_run.index(parts[0]) :])
    url = ""
    for part in [part for part in parts if part.mark != ARTIFACTS and not part.is_empty]:
        if link := _symlink_in(part):
            raise _NotSent(f"{link} is a symbolic link to something outside of this run: remove it")
        output = _in_scratch(deadline, partial(processes.sync, part))
        if not part.log.with_suffix(SYNCED).exists():
            raise _NotSent(output.error or "W&B has not taken it")
        write_file(part.folder / UNSENT, ARTIFACTS.encode())
        url = output.url
    folder = view.layout.root / RECORDED
    if url:  # for `results show`
        write_file(folder / LINKS, json.dumps({**links_in(folder), parts[0].target: url}).encode())
    artifacts = _artifacts(view, parts[-1], links_in(folder).get(parts[0].target, ""))
    # The last part that was sent says how the run ended: an older one that was sent after it said something else.
    if artifacts.checkpoints or artifacts.tables or artifacts.name or was_overtaken:
        output = _in_scratch(deadline, partial(processes.log_artifacts, artifacts))
        if output.error:
            raise _NotSent(f"checkpoints and tables: {output.error}")
    for part in parts:
        _mark(part)


def _in_scratch(deadline: float, send: Callable[[Path, float], SyncOutput]) -> SyncOutput:
    """Call `send` with an empty folder and the seconds that are left. Raises _NotSent if there are none."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise _NotSent("the time limit (--timeout) was over before it began")
    with temp_folder("ddptrain-sync-") as scratch:
        return send(scratch, left_s)


def _mark(part: RunPart) -> None:
    """Mark a part as sent."""
    append(part.log.with_suffix(SYNCED), b"")
    if part.mark is not None:
        write_file(part.folder / UNSENT, SENT.encode())


def _artifacts(view: RunView, part: RunPart, url: str) -> RunArtifacts:
    """Return what is to be logged as artifacts of a part's W&B run, whose `url` may be unknown."""
    record = view.record
    ranks = {about.get("id"): name for name, about in record.tracking.items()}
    rank = int(re.sub(r"\D", "", part.rank or ranks.get(part.run_id, "")) or 0)
    settings = wandb_settings(view.layout)
    checkpoints = kept_checkpoints(view.layout) if settings.checkpoints and rank == 0 else []
    about = record.tracking.get(WANDB, {})
    *_, entity, project, _, _ = ("", "", *url.split("/")) if url else ("", about.get("project", ""), "", "")
    return RunArtifacts(
        run_id=part.target,
        project=project or record.name,
        entity=entity,
        name=part.rank,
        group=view.run_id if part.rank else "",
        exit_code=record.exit_code,
        root=str(view.layout.root),
        ddptrain_run=view.run_id,
        rank=rank,
        table_rows=settings.table_rows,
        checkpoints=[
            (each.step, each.metrics, [str((each.folder / name).relative_to(view.layout.root)) for name in each.files])
            for each in checkpoints
        ],
        tables=tables_of(view.layout, rank) if settings.tables else [],
    )


def _symlink_in(part: RunPart) -> str:
    """Return a symbolic link among a part's files, or "". wandb creates none, and would follow it."""
    files = part.folder / "files"
    return next((str(path) for path in (files, *files.rglob("*")) if path.is_symlink()), "")


# --- a local folder with the W&B recordings of a run in an object store ---


class StoredWandbRun:
    """A local copy, `layout`, of a run in `store`. Files are empty until they are fetched, except for state files.

    State files show which parts were sent.
    """

    def __init__(self, store: RemoteFolder, folder: Path) -> None:
        self.store = store
        self.layout = RunLayout(folder)
        self._paths: list[str] = []
        self._states: dict[str, bytes] = {}

    def refresh(self) -> None:
        """Create the folder again from the current content of the store. Raises ResultsError."""
        files = self.store.files(RECORDED)
        self._paths = [path for path in files if is_plain(path) and not path.startswith(TEMPORARY)]
        self._states = self.store.read_all([path for path in self._paths if _is_state(path)])
        with results_errors(self.layout.root):
            shutil.rmtree(self.layout.root, ignore_errors=True)
            for path in self._paths:
                target = self.layout.root / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(self._states.get(path, b""))

    def fetch(self, parts: Sequence[RunPart], until: float) -> None:
        """Fetch the files of these parts, and what `results sync` logs as artifacts.

        Raises ResultsError; TimeoutError after `until` (monotonic).
        """
        stored = [part for part in parts if part.folder.is_relative_to(self.layout.root)]  # the others are local
        folders = tuple(f"{part.folder.relative_to(self.layout.root).as_posix()}/" for part in stored)
        self._fetch((path for path in self._paths if path.startswith(folders) and not _is_state(path)), until)
        self._fetch(["config.yaml"], until)
        wanted = wandb_settings(self.layout)
        tables = [path for path in self.store.files(f"{ARTIFACTS_FOLDER}/tables") if wanted.tables and is_plain(path)]
        images = self.store.files(f"{ARTIFACTS_FOLDER}/images") if tables else {}
        self._fetch([*tables, *filter(is_plain, images)], until)
        if wanted.checkpoints:
            _check(until)
            download_checkpoints(self.store, self.layout.root)

    def _fetch(self, paths: Iterable[str], until: float) -> None:
        for path in paths:
            _check(until)
            (self.layout.root / path).parent.mkdir(parents=True, exist_ok=True)
            self.store.fetch(path, self.layout.root / path)

    def upload_states(self) -> None:
        """Write state files that have changed to the store. Raises ResultsError."""
        for path in (self.layout.root / RECORDED).rglob("*"):
            name = path.relative_to(self.layout.root).as_posix()
            if _is_state(name) and path.is_file() and self._states.get(name) != (data := path.read_bytes()):
                self.store.write(name, data)


def _is_state(path: str) -> bool:
    return path == f"{RECORDED}/{LINKS}" or path.endswith(STATE_FILES)


def _check(until: float) -> None:
    if time.monotonic() > until:
        raise TimeoutError


# --- checkpoints and tables that are logged as artifacts ---


_TABLE = re.compile(r"(?:step-(?P<step>\d{1,18})-)?rank-(?P<rank>\d{1,9})\.csv")


@dataclass(frozen=True, slots=True)
class WandbSettings:
    """The part of tracking.wandb of a run's recorded configuration that says which artifacts W&B gets."""

    checkpoints: bool = False
    tables: bool = True
    table_rows: int = 1000


def wandb_settings(layout: RunLayout) -> WandbSettings:
    """Return the settings of a run; the defaults if config.yaml is missing or damaged."""
    try:
        section = parsed_config(read_bytes(layout.config_yaml)).get("tracking")
    except OSError:
        section = None
    known = section.get("wandb") if isinstance(section, Mapping) else None
    known = known if isinstance(known, Mapping) else {}
    rows = known.get("table_rows")
    return WandbSettings(
        known.get("checkpoints") is True, known.get("tables") is not False, rows if isinstance(rows, int) else 1000
    )


def kept_checkpoints(layout: RunLayout) -> list[VerifiedCheckpoint]:
    """Return the checkpoints that the run has kept and that match their manifests, the oldest first.

    Their `files` are without the manifest, as in the artifacts of an online run.
    """
    found = []
    for folder in checkpoint_folders(layout):
        try:
            checkpoint = verify(folder)
        except CheckpointDamaged:
            continue
        files = tuple(name for name in checkpoint.files if name != MANIFEST)
        if all(is_in(layout.root, folder / name) for name in files):
            found.append(replace(checkpoint, files=files))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def tables_of(layout: RunLayout, rank: int) -> list[tuple[str, int | None, str]]:
    """Return name, step and path below the run directory of each table that a rank has logged, by step."""
    return sorted(_tables(layout, rank), key=lambda table: (table[0], -1 if table[1] is None else table[1]))


def _tables(layout: RunLayout, rank: int) -> Iterator[tuple[str, int | None, str]]:
    folder = layout.artifacts_dir / "tables"
    for path in folder.rglob("*"):
        match = _TABLE.fullmatch(path.name)
        if match and int(match["rank"]) == rank and is_in(layout.root, path):
            name = path.parent.relative_to(folder).as_posix()
            yield name, int(match["step"]) if match["step"] else None, path.relative_to(layout.root).as_posix()


def is_in(root: Path, path: Path) -> bool:
    """Return whether `path`, which is below `root`, is a file to which no symbolic link below `root` leads."""
    return path.is_file() and path.resolve() == root.resolve() / path.relative_to(root)
