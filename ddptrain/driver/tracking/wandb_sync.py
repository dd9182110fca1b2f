"""Sends the missing parts of runs to W&B: of offline runs, and of online runs that ended before all was sent.

`wandb sync` sends each part of a W&B run (wandb_folders.py); then the run's checkpoints and tables are logged from the
run directory. A part that was sent is marked, and skipped the next time. One that could not be sent stays. A run in an
object store is sent from a local copy, and its marks are written to the store.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ddptrain.errors import RunLocked, UsageError
from ddptrain.file_ops import temp_folder
from ddptrain.results import ownership
from ddptrain.results.checkpoints.verification import verify
from ddptrain.results.errors import CheckpointDamaged, ResultsError, results_errors
from ddptrain.results.layout import ARTIFACTS as ARTIFACTS_FOLDER
from ddptrain.results.layout import MANIFEST, RunLayout, checkpoint_folders
from ddptrain.results.lookup import RunView, load_run
from ddptrain.results.recorded_config import config_of
from ddptrain.results.remote.checkpoints import download_checkpoints
from ddptrain.results.remote.lease import StoreLock
from ddptrain.results.secure_files import append, is_own_folder, make_folder, write_file
from ddptrain.results.tracker_records import RECORDED, TEMPORARY, WANDB, wandb_parts
from ddptrain.storage.object_store import ObjectStore, open_folder
from ddptrain.storage.store import StoreError, is_plain
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
_TABLE = re.compile(r"(?:step-(?P<step>\d{1,18})-)?rank-(?P<rank>\d{1,9})\.csv")


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
        return _sync(view, None, environ, deadline, notice)
    with temp_folder("ddptrain-sync-") as folder:
        copy = _StoredRun(open_folder(view.layout.where), RunLayout(folder / "run"))
        return _sync(RunView(copy.layout, view.record), copy, environ, deadline, notice)


def _sync(
    view: RunView,
    copy: _StoredRun | None,
    environ: Mapping[str, str],
    deadline: float,
    notice: Callable[[str], None],
) -> SyncResult:
    """Send a run; `copy`: the run in a store whose local copy is `view`."""
    try:
        if copy is not None:
            copy.refresh()
        if not _waiting(view):
            return SyncResult(view.run_id)
        if copy is None:
            if not is_own_folder(view.layout.root):
                raise _Skipped("it belongs to another user")
            view = load_run(view.layout.root.absolute())  # absolute: wandb's command runs in another folder
        if view.is_running:
            raise _Skipped("it is running")
        processes = _processes(view, environ, notice)
        if copy is not None:
            with copy.locked(view, deadline):
                return _send_all(view, processes, deadline)
        folder = view.layout.root / RECORDED
        for each in (view.layout.tracking_dir, folder):
            make_folder(each)  # refuses what is not a folder of this user
        held = ownership.Owner(folder / _LOCK).take()
        try:
            return _send_all(view, processes, deadline)
        finally:
            held.release()
    except _Skipped as reason:
        return SyncResult(view.run_id, skipped=str(reason))
    except RunLocked:
        return SyncResult(view.run_id, skipped="another process is sending it")
    except (_NotSent, ResultsError, StoreError) as error:
        return SyncResult(view.run_id, waiting=len(_waiting(view)), problem=str(error))


def _waiting(view: RunView) -> list[RunPart]:
    """Return the parts that the server lacks."""
    return unsent_parts(wandb_parts(view.layout, view.record))


def _processes(view: RunView, environ: Mapping[str, str], notice: Callable[[str], None]) -> WandbProcesses:
    """Return what sends the run with the user's key.

    Raises _NotSent if the run names a server that the user has not chosen; UsageError if there is no API key.
    """
    named = str(view.record.tracking.get(WANDB, {}).get("base_url", ""))
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
    """Send these parts of one W&B run, the oldest first, its artifacts, and mark the parts. Raises _NotSent."""
    of_run = [part for part in wandb_parts(view.layout, view.record) if part.target == parts[0].target]
    was_overtaken = any(part.sent for part in of_run[of_run.index(parts[0]) :])
    url = ""
    for part in [part for part in parts if part.mark != ARTIFACTS and not part.is_empty]:
        files = part.folder / "files"
        if link := next((path for path in (files, *files.rglob("*")) if path.is_symlink()), None):
            # wandb creates none, and would follow it.
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
        append(part.log.with_suffix(SYNCED), b"")
        if part.mark is not None:
            write_file(part.folder / UNSENT, SENT.encode())


def _in_scratch(deadline: float, send: Callable[[Path, float], SyncOutput]) -> SyncOutput:
    """Call `send` with an empty folder and the seconds that are left. Raises _NotSent if there are none."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise _NotSent("the time limit (--timeout) was over before it began")
    with temp_folder("ddptrain-sync-") as scratch:
        return send(scratch, left_s)


# --- checkpoints and tables, which are logged as artifacts ---


def _artifacts(view: RunView, part: RunPart, url: str) -> RunArtifacts:
    """Return what is to be logged as artifacts of a part's W&B run, whose `url` may be unknown."""
    record, settings = view.record, _settings(view)
    ranks = {about.get("id"): name for name, about in record.tracking.items()}
    rank = int(re.sub(r"\D", "", part.rank or ranks.get(part.run_id, "")) or 0)
    about = record.tracking.get(WANDB, {})
    *_, entity, project, _, _ = ("", "", *url.split("/")) if url else ("", about.get("project", ""), "", "")
    rows = settings.get("table_rows")
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
        table_rows=rows if isinstance(rows, int) else 1000,
        checkpoints=sorted(_checkpoints(view.layout), key=lambda each: each[0])
        if _sends_checkpoints(settings) and rank == 0
        else [],
        tables=_tables(view.layout, rank) if _sends_tables(settings) else [],
    )


def _settings(view: RunView) -> Mapping[str, Any]:
    """Return tracking.wandb of the run's recorded configuration; {} if config.yaml is missing or damaged."""
    tracking = config_of(view).get("tracking")
    known = tracking.get(WANDB) if isinstance(tracking, Mapping) else None
    return known if isinstance(known, Mapping) else {}


def _sends_checkpoints(settings: Mapping[str, Any]) -> bool:
    return settings.get("checkpoints") is True


def _sends_tables(settings: Mapping[str, Any]) -> bool:
    return settings.get("tables") is not False


def _checkpoints(layout: RunLayout) -> Iterator[tuple[int, Mapping[str, float], list[str]]]:
    """Yield step, metrics and files of the kept checkpoints that match their manifests, without the manifest."""
    for folder in checkpoint_folders(layout):
        try:
            checkpoint = verify(folder)
        except CheckpointDamaged:
            continue
        files = [folder / name for name in checkpoint.files if name != MANIFEST]
        if all(_is_in(layout.root, path) for path in files):
            yield checkpoint.step, checkpoint.metrics, [str(path.relative_to(layout.root)) for path in files]


def _tables(layout: RunLayout, rank: int) -> list[tuple[str, int | None, str]]:
    """Return name, step and path below the run directory of each table that a rank has logged, by step."""
    folder, found = layout.artifacts_dir / "tables", []
    for path in folder.rglob("*"):
        match = _TABLE.fullmatch(path.name)
        if match and int(match["rank"]) == rank and _is_in(layout.root, path):
            name = path.parent.relative_to(folder).as_posix()
            found.append((name, int(match["step"]) if match["step"] else None, str(path.relative_to(layout.root))))
    return sorted(found, key=lambda table: (table[0], -1 if table[1] is None else table[1]))


def _is_in(root: Path, path: Path) -> bool:
    """Return whether `path`, which is below `root`, is a file to which no symbolic link below `root` leads."""
    return path.is_file() and path.resolve() == root.resolve() / path.relative_to(root)


# --- a run in an object store ---


class _StoredRun:
    """A local copy, `layout`, of what W&B has recorded of a run in `store`.

    Files are empty until they are fetched, except for state files, which show what was sent.
    """

    def __init__(self, store: ObjectStore, layout: RunLayout) -> None:
        self._store, self.layout = store, layout
        self._paths: list[str] = []
        self._states: dict[str, bytes] = {}

    def refresh(self) -> None:
        """Create the folder again from the current content of the store. Raises ResultsError."""
        files = self._store.files(RECORDED)
        self._paths = [path for path in files if is_plain(path) and not path.startswith(TEMPORARY)]
        self._states = self._store.read_all([path for path in self._paths if _is_state(path)])
        with results_errors(self.layout.root):
            shutil.rmtree(self.layout.root, ignore_errors=True)
            for path in self._paths:
                target = self.layout.root / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(self._states.get(path, b""))

    @contextmanager
    def locked(self, view: RunView, deadline: float) -> Iterator[None]:
        """Hold the run's lock in the store, with all files that are to be sent; write the states at the end."""
        lock = StoreLock(self._store.below(RECORDED))
        lock.take()
        # If the lock is lost, another process sends the same rows: the server recognizes them by their steps.
        lock.keep(lambda error: None)
        try:
            self.refresh()  # another process may have sent it before we had the lock
            self._fetch_all(view, deadline)
            try:
                yield
            finally:
                for path in (self.layout.root / RECORDED).rglob("*"):
                    name = path.relative_to(self.layout.root).as_posix()
                    if _is_state(name) and path.is_file() and self._states.get(name) != (data := path.read_bytes()):
                        self._store.write(name, data)
        finally:
            lock.release(forget=True)

    def _fetch_all(self, view: RunView, deadline: float) -> None:
        """Fetch the parts that wait, and what is logged as artifacts. Raises ResultsError; _NotSent."""
        root = self.layout.root
        stored = [part.folder for part in _waiting(view) if part.folder.is_relative_to(root)]  # the others are local
        folders = tuple(f"{folder.relative_to(root).as_posix()}/" for folder in stored)
        self._fetch((path for path in self._paths if path.startswith(folders) and not _is_state(path)), deadline)
        self._fetch(["config.yaml"], deadline)
        settings = _settings(view)
        if _sends_tables(settings) and (tables := self._store.files(f"{ARTIFACTS_FOLDER}/tables")):
            self._fetch(filter(is_plain, [*tables, *self._store.files(f"{ARTIFACTS_FOLDER}/images")]), deadline)
        if _sends_checkpoints(settings):
            download_checkpoints(self._store, root)

    def _fetch(self, paths: Iterable[str], deadline: float) -> None:
        for path in paths:
            if time.monotonic() > deadline:
                raise _NotSent("the time limit (--timeout) was over before they were fetched")
            (self.layout.root / path).parent.mkdir(parents=True, exist_ok=True)
            self._store.fetch(path, self.layout.root / path)


def _is_state(path: str) -> bool:
    return path == f"{RECORDED}/{LINKS}" or path.endswith(STATE_FILES)
