"""Sends the missing parts of runs to W&B: of offline runs, and of online runs that ended before all was sent.

`wandb sync` sends each part of a W&B run (wandb_files.py), and marks it with a file beside its log. A part without
that mark is sent the next time. A run in an object store is sent from a local copy, and its marks are written to the
store. Checkpoints and tables of offline runs are not sent: the run directory has them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ddptrain.errors import RunLocked, UsageError
from ddptrain.file_ops import temp_folder
from ddptrain.protocol.exec_env import without_working_directory
from ddptrain.results import ownership
from ddptrain.results.errors import ResultsError, results_errors
from ddptrain.results.layout import RECORDED, WANDB
from ddptrain.results.remote.lease import Lease
from ddptrain.results.remote.stored_runs import forget_run
from ddptrain.results.remote.uploader import TEMPORARY
from ddptrain.results.run import Run
from ddptrain.results.secure_files import append, is_own_folder, make_folder, write_file
from ddptrain.storage.object_store import ObjectStore, open_folder
from ddptrain.storage.store import StoreError, is_plain
from ddptrain.tracking.wandb_files import (
    BASE_URL,
    KEY,
    LINKS,
    STATE_FILES,
    SYNCED,
    TOKEN_FILE,
    RunPart,
    access_to,
    links_in,
    unsent_parts,
    without_credentials,
)

_LOCK = ".sync.lock"
# Variables that describe how the run was recorded, not how it is sent.
_NOT_PASSED_ON = frozenset(
    {
        *("WANDB_MODE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SERVICE", "WANDB_SILENT", "WANDB_QUIET"),
        *("WANDB_NAME", "WANDB_NOTES", "WANDB_TAGS", "WANDB_RUN_GROUP", "WANDB_JOB_TYPE", "WANDB_PROJECT"),
    }
)
# Paths that may be relative to the user's working directory. `wandb sync` runs in another one.
_PATHS = ("WANDB_CONFIG_DIR", "WANDB_CREDENTIALS_FILE", TOKEN_FILE)
_KILL_S = 2.0
_NOTICE_S = 5.0
# Without the line that names wandb's log file, which is deleted with the folder in which the command ran.
_ERROR = re.compile(r"^(?:.*\bERROR|Error:) +(?!Find detailed error logs)(.+?)\s*$", re.MULTILINE)
_LINK = re.compile(r"\bhttps?://\S+/runs/[^/\s]+")


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
    views: Sequence[Run], timeout_s: float, tell: Callable[[SyncResult], None], notice: Callable[[str], None]
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
    view: Run, environ: Mapping[str, str], deadline: float, notice: Callable[[str], None] = print
) -> SyncResult:
    """Send the missing parts of a run, until `deadline` (monotonic). Raises UsageError if there is no API key."""
    copy = None
    with ExitStack() as stack:
        try:
            if not view.is_original:
                folder = stack.enter_context(temp_folder("ddptrain-sync-"))
                copy = _StoredRun(open_folder(view.where), Run(folder / "run"))
                view = Run(copy.layout.root, view.record)
                copy.refresh()
            if not _waiting(view):
                return SyncResult(view.run_id)
            if copy is None:
                if not is_own_folder(view.root):
                    raise _Skipped("it belongs to another user")
                view = Run(view.root.absolute())  # absolute: wandb's command runs in another folder
            if view.is_running:
                raise _Skipped("it is running")
            env = _environment(view, environ)
            stack.enter_context(_locked(view) if copy is None else copy.locked(view, deadline))
            waiting, problem = _waiting(view), ""
            for target in dict.fromkeys(part.target for part in waiting):
                try:
                    for part in (part for part in waiting if part.target == target):
                        _send(view, part, env, deadline, notice)
                except _NotSent as error:
                    problem = problem or str(error)
            left = len(_waiting(view))
            return SyncResult(view.run_id, len(waiting) - left, left, problem)
        except _Skipped as reason:
            return SyncResult(view.run_id, skipped=str(reason))
        except RunLocked:
            return SyncResult(view.run_id, skipped="another process is sending it")
        except (_NotSent, ResultsError, StoreError) as error:
            return SyncResult(view.run_id, waiting=len(_waiting(view)), problem=str(error))


def _waiting(view: Run) -> list[RunPart]:
    """Return the parts that the server lacks, the oldest first."""
    return unsent_parts(view.wandb_parts())


@contextmanager
def _locked(layout: Run) -> Iterator[None]:
    folder = layout.root / RECORDED
    for each in (layout.tracking_dir, folder):
        make_folder(each)  # refuses what is not a folder of this user
    with ownership.LockFile(folder / _LOCK):
        yield


def _send(view: Run, part: RunPart, env: Mapping[str, str], deadline: float, notice: Callable[[str], None]) -> None:
    """Send a part, and record the address of its W&B run for `results show`. Raises _NotSent."""
    if part.is_empty:
        append(part.log.with_suffix(SYNCED), b"")
        return
    files = part.folder / "files"
    if link := next((path for path in (files, *files.rglob("*")) if path.is_symlink()), None):
        # wandb creates none, and would follow it.
        raise _NotSent(f"{link} is a symbolic link to something outside of this run: remove it")
    if (left_s := deadline - time.monotonic()) <= 0:
        raise _NotSent("the time limit (--timeout) was over before it began")
    with temp_folder("ddptrain-sync-") as scratch:
        error, url = _wandb_sync(part, env, scratch, left_s, lambda text: notice(f"{view.run_id}: {text}"))
    if not part.log.with_suffix(SYNCED).exists():
        raise _NotSent(error or "W&B has not taken it")
    if url:
        folder = view.root / RECORDED
        write_file(folder / LINKS, json.dumps({**links_in(folder), part.target: url}).encode())


# --- `wandb sync` ---


def _environment(view: Run, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the user's environment for `wandb sync`, with the user's key, and nothing about the recording of runs.

    Raises _NotSent if the run names a server that the user has not chosen; UsageError if there is no API key.
    """
    named = str(view.record.tracking.get(WANDB, {}).get("base_url", ""))
    access = access_to(named, environ)
    if access is None:
        advice = f"set WANDB_BASE_URL={shlex.quote(named)} if your key is to go there"
        raise _NotSent(f"they are for {named}: {advice}")
    if not access.has_credentials:
        raise UsageError("there is no API key of W&B: set WANDB_API_KEY, or run `wandb login`")
    env = {name: value for name, value in environ.items() if name not in _NOT_PASSED_ON}
    env |= {name: str(Path(env[name]).expanduser().absolute()) for name in _PATHS if env.get(name)}
    env |= {name: value for name, value in ((KEY, access.key), (BASE_URL, access.base_url)) if value}
    return {"WANDB_ERROR_REPORTING": "false", **env, "NO_COLOR": "1"}


def _wandb_sync(
    part: RunPart, env: Mapping[str, str], scratch: Path, timeout_s: float, notice: Callable[[str], None]
) -> tuple[str, str]:
    """Run `wandb sync`; kill it after `timeout_s`. Return its last error message, and the URL of the run, each or "".

    Its exit code does not show whether the log was sent: if it was, there is a file with the suffix SYNCED.
    `scratch` is a folder in which it runs and writes: from any other working directory wandb would read settings such
    as the server, and Python would import modules.
    """
    env = {**env, "TMPDIR": str(scratch)}  # for wandb's log file, and what it leaves if it is killed
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        env[name] = f"{scratch}/{name}"
        Path(env[name]).mkdir()
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "wandb", "sync", "--include-online", "--include-synced"),
            *(["--id", part.target] if part.target != part.run_id else []),
            str(part.log),
        ],
        cwd=scratch,
        env=without_working_directory(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    text, reason = "", f"it was not done in {timeout_s:.0f} s"
    with _killed_at_end(process), suppress(subprocess.TimeoutExpired):
        with suppress(subprocess.TimeoutExpired):
            text, reason = process.communicate(timeout=min(_NOTICE_S, timeout_s))[0], ""
        if reason and timeout_s > _NOTICE_S:
            left_s = timeout_s - _NOTICE_S
            notice(f"waiting for {env.get(BASE_URL) or 'W&B'} to take the data, for {left_s:.0f} s at most (--timeout)")
            text, reason = process.communicate(timeout=left_s)[0], ""
    if reason:
        text = process.communicate(timeout=_KILL_S)[0]
    errors, urls = _ERROR.findall(text), _LINK.findall(text)
    return without_credentials(errors[-1] if errors else reason, env), urls[-1] if urls else ""


@contextmanager
def _killed_at_end(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill the process and its descendants at the end of the block, if the process still runs."""
    import psutil

    try:
        yield
    finally:
        with suppress(psutil.Error):
            processes = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            for each in processes if process.poll() is None else ():
                with suppress(psutil.Error):
                    each.kill()


# --- a run in an object store ---


class _StoredRun:
    """A local copy, `layout`, of what W&B has recorded of a run in `store`.

    Files are empty until they are fetched, except for state files, which show what was sent.
    """

    def __init__(self, store: ObjectStore, layout: Run) -> None:
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
    def locked(self, view: Run, deadline: float) -> Iterator[None]:
        """Hold the run's lock in the store, with all files that are to be sent; write the states at the end."""
        root = self.layout.root
        lock = Lease(self._store.below(RECORDED)).take()
        # If the lock is lost, another process sends the same rows: the server recognizes them by their steps.
        lock.keep()
        try:
            self.refresh()  # another process may have sent it before we had the lock
            stored = [part.folder for part in _waiting(view) if part.folder.is_relative_to(root)]  # others are local
            folders = tuple(f"{folder.relative_to(root).as_posix()}/" for folder in stored)
            for path in self._paths:
                if path.startswith(folders) and not _is_state(path):
                    if time.monotonic() > deadline:
                        raise _NotSent("the time limit (--timeout) was over before they were fetched")
                    self._store.fetch(path, root / path)
            try:
                yield
            finally:
                for file in (root / RECORDED).rglob("*"):
                    name = file.relative_to(root).as_posix()
                    if _is_state(name) and file.is_file() and self._states.get(name) != (data := file.read_bytes()):
                        self._store.write(name, data)
                        forget_run(self._store)
        finally:
            lock.release(forget=True)


def _is_state(path: str) -> bool:
    return path == f"{RECORDED}/{LINKS}" or path.endswith(STATE_FILES)
