"""Sends the missing parts of runs to W&B: of offline runs, and of online runs that ended before all was sent.

A part that was sent is marked, and skipped the next time. A part that could not be sent stays for the next time.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddptrain.config.wording import counted
from ddptrain.driver.tracking.wandb_stored_run import StoredWandbRun
from ddptrain.errors import RunLocked, UsageError
from ddptrain.file_ops import temp_folder
from ddptrain.results.errors import ResultsError
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView, load_run
from ddptrain.results.ownership import run_lock
from ddptrain.results.remote.lease import StoreLock
from ddptrain.results.run_record import RunStatus
from ddptrain.results.secure_files import append, is_own_folder, make_folder, write_file
from ddptrain.results.tracker_records import RECORDED, wandb_parts
from ddptrain.storage.remote_folder import RemoteFolder
from ddptrain.storage.store import StoreError
from ddptrain.tracking.wandb import transaction_log
from ddptrain.tracking.wandb.credentials import BASE_URL, KEY, access_to
from ddptrain.tracking.wandb.sync_command import sync_environment, sync_logs
from ddptrain.tracking.wandb.transaction_log import LoggedFile, SeparateRun
from ddptrain.tracking.wandb.wandb_folders import (
    CHECKPOINT_TYPE,
    LINKS,
    SYNC_STATE,
    SYNCED,
    UNSENT,
    RunPart,
    links_in,
    unsent_parts,
)

_LOCK = ".sync.lock"
_STAGED = "/artifacts/staging/"  # below wandb's data folder: its copies of the files of artifacts
_DATA = "data"  # that folder, below a run's tracking/wandb


@dataclass(frozen=True, slots=True)
class SyncResult:
    """The result for one run: how many parts were sent, how many still wait, and why.

    `problem` is "" if nothing went wrong. `skipped` is the reason if the run was skipped. `left_out` counts
    checkpoints of an offline run that the run directory no longer keeps.
    """

    run_id: str
    sent: int = 0
    waiting: int = 0
    left_out: int = 0
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
        less = f", without {counted(self.left_out, 'checkpoint')} that the run no longer keeps" if self.left_out else ""
        return f"{self.run_id}: " + (f"{self.sent} sent to W&B{less}" if self.sent else "nothing to send to W&B")


class _Skipped(Exception):
    """The run must not be sent now."""


class _NotSent(Exception):
    """Something prevents sending the run."""


def sync_runs(views: Sequence[RunView], timeout_s: float, tell: Callable[[SyncResult], None]) -> bool:
    """Send all runs, within `timeout_s` together. Return whether everything that should be sent was sent."""
    deadline = time.monotonic() + timeout_s
    all_well = True
    for view in views:
        result = sync_run(view, os.environ, deadline)
        tell(result)
        all_well = all_well and not result.problem
    return all_well


def sync_run(view: RunView, environ: Mapping[str, str], deadline: float) -> SyncResult:
    """Send the missing parts of a run, until `deadline` (monotonic). Raises UsageError if there is no API key."""
    if view.layout.is_original:
        return _result(view, lambda: _sync_local(view, environ, deadline))
    with temp_folder("ddptrain-sync-") as folder:
        stored = StoredWandbRun(RemoteFolder.open(view.layout.where), folder / "run")
        local_view = RunView(stored.layout, view.record)
        return _result(local_view, lambda: _sync_stored(view, local_view, stored, environ, deadline))


def _result(view: RunView, sync: Callable[[], SyncResult]) -> SyncResult:
    try:
        return sync()
    except _Skipped as reason:
        return SyncResult(view.run_id, skipped=str(reason))
    except RunLocked:
        return SyncResult(view.run_id, skipped="another process is sending it")
    except (_NotSent, ResultsError, StoreError) as error:
        return SyncResult(view.run_id, waiting=len(_waiting(view)), problem=str(error))


def _sync_local(view: RunView, environ: Mapping[str, str], deadline: float) -> SyncResult:
    if not _waiting(view):
        return SyncResult(view.run_id)
    if not is_own_folder(view.layout.root):
        raise _Skipped("it belongs to another user")
    view = load_run(view.layout.root.absolute())  # absolute: wandb's command runs in another folder
    _check_ended(view)
    env = _environment(view, environ)
    held = run_lock.take(_recorded_folder(view.layout) / _LOCK)
    try:
        return _send_all(view, env, deadline)
    finally:
        os.close(held)


def _sync_stored(
    view: RunView, local_view: RunView, stored: StoredWandbRun, environ: Mapping[str, str], deadline: float
) -> SyncResult:
    """Send a run of an object store, whose files are fetched to the folder of `local_view`."""
    stored.refresh()
    if not _waiting(local_view):
        return SyncResult(view.run_id)
    _check_ended(view)
    env = _environment(local_view, environ)
    lock_file = StoreLock(stored.store.below(RECORDED))
    lock_file.take(contested=True)
    # If the lock is lost, another process sends the same rows: the server recognizes them by their steps.
    lock_file.keep(lambda error: None)
    try:
        stored.refresh()  # another process may have sent it before we had the lock
        try:
            stored.fetch(_waiting(local_view), deadline)
        except TimeoutError:
            raise _NotSent("the time limit (--timeout) was over before they were fetched") from None
        try:
            return _send_all(local_view, env, deadline)
        finally:
            stored.upload_states()
    finally:
        lock_file.release(forget=True)


def _check_ended(view: RunView) -> None:
    """Raise _Skipped unless the run's driver is known to have ended."""
    if view.is_running:
        raise _Skipped("it is running")
    if view.status == RunStatus.UNKNOWN:
        host = view.record.driver.host
        raise _Skipped(f"its driver may be running on {host}, which cannot be seen from this host")


def _recorded_folder(layout: RunLayout) -> Path:
    """The folder that W&B records into. Raises ResultsError if it, or tracking/, is not a folder of this user."""
    folder = layout.root / RECORDED
    for each in (layout.tracking_dir, folder):
        make_folder(each)
    return folder


def _waiting(view: RunView) -> list[RunPart]:
    """Return the parts that the server lacks."""
    return unsent_parts(wandb_parts(view.layout, view.record))


def _environment(view: RunView, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of wandb's command.

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
    return sync_environment(environ) | chosen


def _send_all(view: RunView, env: Mapping[str, str], deadline: float) -> SyncResult:
    """Send the parts in rounds: in each, the earliest waiting part of each W&B run; later parts continue it."""
    sent, left_out, problem = 0, 0, ""
    stuck: set[str] = set()
    while parts := [part for part in _waiting(view) if part.target not in stuck]:
        first = list({part.target: part for part in reversed(parts)}.values())
        error, left_out_of = _send(view, first, env, deadline)
        done = [part for part in first if part.sent]
        sent += len(done)
        left_out += sum(left_out_of.get(part, 0) for part in done)
        if len(done) < len(first):
            stuck |= {part.target for part in first} - {part.target for part in done}
            problem = problem or error or "W&B has not taken it"
    return SyncResult(view.run_id, sent, len(_waiting(view)), left_out, problem)


def _send(
    view: RunView, parts: Sequence[RunPart], env: Mapping[str, str], deadline: float
) -> tuple[str, dict[RunPart, int]]:
    """Send these parts. Return an error message or "", and how many checkpoints were left out of each part."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return "the time limit (--timeout) was over before it began", {}
    known = wandb_parts(view.layout, view.record)
    with temp_folder("ddptrain-sync-") as scratch:
        prepared: dict[RunPart, tuple[Path, int]] = {}
        problem = ""
        for number, part in enumerate(parts):
            if transaction_log.is_empty(part.log):
                _mark(part)
                continue
            parts_of_run = [each for each in known if each.target == part.target]
            try:
                prepared[part] = _prepare(part, parts_of_run, view, scratch / str(number))
            except _NotSent as error:
                problem = problem or str(error)
        if not prepared:
            return problem, {}
        cwd = scratch / "cwd"
        cwd.mkdir()
        output = sync_logs([log for log, _ in prepared.values()], env, cwd, left_s)
        for part, (log, _) in prepared.items():
            state = log.with_suffix(SYNC_STATE)
            if log != part.log and state.is_file() and not state.is_symlink():
                write_file(part.folder / state.name, state.read_bytes())
            if log.with_suffix(SYNCED).exists():
                _mark(part)
    if output.urls:  # for `results show`
        folder = view.layout.root / RECORDED
        write_file(folder / LINKS, json.dumps({**links_in(folder), **output.urls}).encode())
    return problem or output.error, {part: left_out for part, (_, left_out) in prepared.items()}


def _mark(part: RunPart) -> None:
    """Mark a part as sent."""
    append(part.log.with_suffix(SYNCED), b"")
    with suppress(OSError):
        (part.folder / UNSENT).unlink(missing_ok=True)


def _prepare(part: RunPart, parts_of_run: Sequence[RunPart], view: RunView, scratch: Path) -> tuple[Path, int]:
    """Return the log to send, and how many checkpoints were left out because the run no longer keeps them.

    It is the log of the part, or a changed copy of it in `scratch`; `parts_of_run` are all parts of the same W&B run. A
    copy is needed if artifacts' files have moved (wandb would silently skip them); if a later part was sent before
    (then this part must not set the run's final state); and for a part of a shared run (it becomes a run of its rank).
    Raises _NotSent.
    """
    located = {file: _locate(file, view) for file in transaction_log.staged_files(part.log)}
    overtaken = parts_of_run[-1] != part and any(each.sent for each in parts_of_run)
    if link := _symlink_in(part):
        raise _NotSent(f"{link} is a symbolic link to something outside of this run: remove it")
    if not overtaken and not part.rank and all(str(path) == file.path for file, path in located.items()):
        return part.log, 0
    missing = [file for file, path in located.items() if path is None]
    if others := [file.path for file in missing if file.artifact_type != CHECKPOINT_TYPE]:
        raise _NotSent(f"{len(others)} files of artifacts are missing, as {others[0]}")
    folder = scratch / part.folder.name
    folder.mkdir(parents=True)
    # An online part that was overtaken has no valid sync state: its steps are those of the later attempt.
    left = {part.log} if part.offline or not overtaken else {part.log, part.log.with_suffix(SYNC_STATE)}
    for entry in {*part.folder.iterdir()} - left:
        (folder / entry.name).symlink_to(entry)
    new = folder / f"run-{part.target}.wandb"
    separate = SeparateRun(part.target, part.rank, view.run_id) if part.rank else None
    exit_code = view.record.exit_code if overtaken else None
    transaction_log.rewrite(part.log, new, located.get, exit_code, separate)
    return new, len({Path(file.path).parent for file in missing})


def _locate(file: LoggedFile, view: RunView) -> Path | None:
    """Where a file of an artifact is now; None if it is gone, or if the log names a file that is not of the run."""
    if file.artifact_type == CHECKPOINT_TYPE:
        *_, folder, name = ("", *Path(file.path).parts)
        kept = view.layout.checkpoints_dir / folder / name
        safe = re.fullmatch(r"step-\d+", folder) and _is_file_in(kept, view.layout.checkpoints_dir / folder)
        return kept if safe and file.md5 in ("", _md5(kept)) else None  # an attempt may have saved that step again
    _, found, rest = file.path.rpartition(_STAGED)
    if not found or "/" in rest or file.is_list:
        return None
    moved = view.layout.root / RECORDED / _DATA / _STAGED.strip("/") / rest
    return next((path for path in (Path(file.path), moved) if _is_file_in(path, path.parent)), None)


def _is_file_in(path: Path, folder: Path) -> bool:
    """Return whether `path`, with symbolic links resolved, is a file of its name in a folder of that name."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):
        return False
    return real.is_file() and real.parts[-3:] == (*folder.parts[-2:], path.name)


def _symlink_in(part: RunPart) -> str:
    """Return a symbolic link among a part's files, or "". wandb creates none, and would follow it."""
    files = part.folder / "files"
    return next((str(path) for path in (files, *files.rglob("*")) if path.is_symlink()), "")


def _md5(path: Path) -> str:
    """Return the digest as W&B writes it: base64."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
    return base64.b64encode(digest.digest()).decode()
