"""Sends offline runs of W&B to the server: what is there is marked and passed over, what fails waits for another time.

wandb's own command does the sending, in a process of its own, which is given a deadline; its exit code says nothing,
but a file that it leaves beside each part that the server has.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ddptrain.config.wording import counted
from ddptrain.driver.tracking.wandb_credentials import BASE_URL, KEY, TOKEN_FILE, access_to
from ddptrain.errors import RunLocked, UsageError
from ddptrain.protocol.exec_env import without_working_directory
from ddptrain.protocol.wandb_parts import CHECKPOINT_TYPE, LINKS, SYNC_STATE, SYNCED, UNSENT, Part, links_in, waiting
from ddptrain.redact import hide_credentials
from ddptrain.results.errors import ResultsError
from ddptrain.results.files import append, is_own_folder, make_folder, write_whole
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView, load_run
from ddptrain.results.ownership import lock
from ddptrain.results.ownership.driver_heartbeat import WATCH_S
from ddptrain.results.record import RunStatus
from ddptrain.results.remote.lock import StoreLock
from ddptrain.results.remote.store import Store
from ddptrain.results.tracking import wandb_log
from ddptrain.results.tracking.foreign_runs import Borrowed
from ddptrain.results.tracking.record import RECORDED, wandb_parts

_LOCK = ".sync.lock"
_STAGED = "/artifacts/staging/"  # where wandb's copies of artifacts are, below its data folder
_DATA = "data"  # that folder, below a run's tracking/wandb
# How the run was made is no matter of how it is sent.
_NOT_PASSED_ON = frozenset(
    {"WANDB_MODE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SERVICE", "WANDB_SILENT", "WANDB_QUIET"}
)
# Paths that may be relative to the folder of the user, in which wandb's command does not run.
_PATHS = ("WANDB_CONFIG_DIR", "WANDB_CREDENTIALS_FILE", TOKEN_FILE)
_PARTING_S = 2.0
_BEING_SENT = "another process is sending it"
# Not the line that names a log file: that is gone with the folder in which the command ran.
_ERROR = re.compile(r"^(?:.*\bERROR|Error:) +(?!Find detailed error logs)(.+?)\s*$", re.MULTILINE)
_LINK = re.compile(r"/(?P<id>[^/\]\s]+)\] View run .*?at (?P<url>https?://\S+)")


@dataclass(frozen=True, slots=True)
class Sent:
    """What came of one run: how many parts were sent, how many wait, and why ("" where all is well).

    `left_out` counts checkpoints, recorded offline, that the run no longer keeps.
    """

    run_id: str
    sent: int = 0
    waiting: int = 0
    left_out: int = 0
    problem: str = ""
    passed_over: str = ""

    @property
    def words(self) -> str:
        """In a line."""
        if self.passed_over:
            return f"{self.run_id}: left alone, {self.passed_over}"
        if self.problem:
            parts = f"{self.waiting} of {self.sent + self.waiting} W&B runs " if self.waiting else ""
            return f"{self.run_id}: {parts}not sent: {self.problem}"
        less = f", less {counted(self.left_out, 'checkpoint')} that the run no longer keeps" if self.left_out else ""
        return f"{self.run_id}: " + (f"{self.sent} sent to W&B{less}" if self.sent else "nothing to send to W&B")


def sync_run(view: RunView, environ: Mapping[str, str], deadline: float) -> Sent:
    """Send what the server lacks of a run, until `deadline` (monotonic).

    Raises UsageError where there is no key.
    """
    if not view.layout.is_original:
        return _sync_stored(view, environ, deadline)
    if not _waiting(view):
        return Sent(view.run_id)
    if not is_own_folder(view.layout.root):
        return Sent(view.run_id, passed_over="it belongs to another user")
    # Absolute, as wandb's command runs in another folder.
    view = load_run(view.layout.root.absolute(), watch_s=WATCH_S)
    if why := _may_be_running(view):
        return Sent(view.run_id, passed_over=why)
    env = _environment(view, environ)
    if isinstance(env, Sent):
        return env
    try:
        held = lock.take(_folder_of_recorded(view.layout) / _LOCK)
    except RunLocked:
        return Sent(view.run_id, passed_over=_BEING_SENT)
    except ResultsError as error:
        return Sent(view.run_id, waiting=len(_waiting(view)), problem=str(error))
    try:
        return _send_all(view, env, deadline)
    finally:
        os.close(held)


def _sync_stored(view: RunView, environ: Mapping[str, str], deadline: float) -> Sent:
    """The same with a run in an object store, from a folder to which what waits is fetched."""
    store = Store.open(view.layout.where)
    with tempfile.TemporaryDirectory(prefix="ddptrain-sync-") as folder:
        borrowed = Borrowed(store, Path(folder) / "run")
        here = RunView(borrowed.layout, view.record)
        lock_file = StoreLock(store.below(RECORDED))
        try:
            borrowed.outline()
            if not _waiting(here):
                return Sent(view.run_id)
            if why := _may_be_running(view):
                return Sent(view.run_id, passed_over=why)
            env = _environment(here, environ)
            if isinstance(env, Sent):
                return env
            lock_file.take(contested=True)
            lock_file.keep(lambda error: None)  # who has it then sends the same, and the server knows it by its steps
        except RunLocked:
            return Sent(view.run_id, passed_over=_BEING_SENT)
        except ResultsError as error:
            return Sent(view.run_id, problem=str(error))
        try:
            return _send_borrowed(borrowed, here, env, deadline)
        finally:
            lock_file.release(forget=True)


def _send_borrowed(borrowed: Borrowed, here: RunView, env: Mapping[str, str], deadline: float) -> Sent:
    """Send what waits of a run whose lock is held, and have its store know of it."""
    try:
        borrowed.outline()  # another process may have sent it by now
        borrowed.fetch(_waiting(here), deadline)
        try:
            return _send_all(here, env, deadline)
        finally:
            borrowed.give_back()
    except TimeoutError:
        problem = "there was no time left to fetch them"
    except ResultsError as error:
        problem = str(error)
    return Sent(here.run_id, waiting=len(_waiting(here)), problem=problem)


def _may_be_running(view: RunView) -> str:
    """Why a run is left alone; "" where its driver is known to have ended."""
    if view.is_running:
        return "it is running"
    if view.status == RunStatus.UNKNOWN:
        return f"its driver may be running on {view.record.driver.host}, which cannot be seen from this host"
    return ""


def _folder_of_recorded(layout: RunLayout) -> Path:
    """The folder that W&B records into; every folder on the way is this user's. Raises ResultsError."""
    folder = layout.root / RECORDED
    for each in (layout.tracking_dir, folder):
        make_folder(each)
    return folder


def _waiting(view: RunView) -> list[Part]:
    """The parts that the server lacks."""
    return waiting(wandb_parts(view.layout, view.record))


def _environment(view: RunView, environ: Mapping[str, str]) -> dict[str, str] | Sent:
    """The environment of wandb's command, or what came of a run whose server the user has not chosen.

    Raises UsageError where there is no key.
    """
    named = str(view.record.tracking.get("wandb", {}).get("base_url", ""))
    access = access_to(named, environ)
    if access is None:
        advice = f"set WANDB_BASE_URL={shlex.quote(named)} if your key is to go there"
        return Sent(view.run_id, waiting=len(_waiting(view)), problem=f"they are for {named}: {advice}")
    if not access.is_there:
        raise UsageError("there is no API key of W&B: set WANDB_API_KEY, or run `wandb login`")
    env = {name: value for name, value in environ.items() if name not in _NOT_PASSED_ON}
    env |= {name: str(Path(env[name]).expanduser().absolute()) for name in _PATHS if env.get(name)}
    env |= {name: value for name, value in ((KEY, access.key), (BASE_URL, access.base_url)) if value}
    return env | {"WANDB_ERROR_REPORTING": env.get("WANDB_ERROR_REPORTING", "false"), "NO_COLOR": "1"}


def _send_all(view: RunView, env: Mapping[str, str], deadline: float) -> Sent:
    """Wave after wave: of each W&B run the earliest part that waits, for later ones go on where it ends."""
    sent, left_out, problem = 0, 0, ""
    stuck: set[str] = set()
    while parts := [part for part in _waiting(view) if part.target not in stuck]:  # looked at under the lock
        first = list({part.target: part for part in reversed(parts)}.values())
        said, lacking = _send(view, first, env, deadline)
        done = [part for part in first if part.sent]
        sent += len(done)
        left_out += sum(lacking.get(part, 0) for part in done)
        if len(done) < len(first):
            stuck |= {part.target for part in first} - {part.target for part in done}
            problem = problem or said or "W&B has not taken it"
    return Sent(view.run_id, sent, len(_waiting(view)), left_out, problem)


def _send(view: RunView, parts: Sequence[Part], env: Mapping[str, str], deadline: float) -> tuple[str, dict[Part, int]]:
    """Send these; what went wrong, as wandb says it, and how many checkpoints were left out of each."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return "there was no time left for it", {}
    with tempfile.TemporaryDirectory(prefix="ddptrain-sync-") as scratch:
        own = {name: f"{scratch}/{name}" for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR")}
        for folder in own.values():
            Path(folder).mkdir()
        own["TMPDIR"] = scratch  # wandb's command leaves its log there, and all that it has there where it is killed
        ready: dict[Part, _Ready] = {}
        known = wandb_parts(view.layout, view.record)
        for number, part in enumerate(parts):
            if wandb_log.is_empty(part.log):
                _mark(part)
                continue
            family = [each for each in known if each.target == part.target]
            ready[part] = _made_ready(part, family, view, Path(scratch) / str(number))
        problem = next((each.problem for each in ready.values() if each.problem), "")
        ready = {part: each for part, each in ready.items() if not each.problem}
        if not ready:
            return problem, {}
        said, ended = _run_wandb([each.log for each in ready.values()], {**env, **own}, Path(scratch), left_s)
        for part, log in ((part, each.log) for part, each in ready.items()):
            if log != part.log and (state := log.with_suffix(SYNC_STATE)).is_file() and not state.is_symlink():
                write_whole(part.folder / state.name, state.read_bytes())
            if log.with_suffix(SYNCED).exists():
                _mark(part)
    _keep_links(view.layout.root / RECORDED, said)
    errors = _ERROR.findall(said)
    reason = errors[-1] if errors else "" if ended else f"it was not done in {left_s:.0f} s"
    key = env.get(KEY, "")
    said = hide_credentials(reason.replace(key, "<left out>") if key else reason)[:300]
    return problem or said, {part: each.left_out for part, each in ready.items()}


def _keep_links(folder: Path, said: str) -> None:
    """Note where the runs are to be seen, for `results show`."""
    found = {match["id"]: match["url"] for match in _LINK.finditer(said)}
    if found:
        write_whole(folder / LINKS, json.dumps({**links_in(folder), **found}).encode())


def _mark(part: Part) -> None:
    append(part.log.with_suffix(SYNCED), b"")
    with suppress(OSError):
        (part.folder / UNSENT).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A log to send, or why it can't be; `left_out` counts checkpoints that the run no longer keeps."""

    log: Path
    problem: str = ""
    left_out: int = 0


def _made_ready(part: Part, family: Sequence[Part], view: RunView, scratch: Path) -> _Ready:
    """What to send of a part: its log, or another one in `scratch`. `family` are all that go to the same run.

    Of a run that was moved, wandb passes artifacts over silently. A part that was overtaken by a later attempt does not
    say how the run has ended; one of a run that ranks share becomes a run of its rank.
    """
    places = {file: _place(file, view) for file in wandb_log.staged_files(part.log)}
    overtaken = family[-1] != part and any(each.sent for each in family)
    if stray := _stray(part):
        return _Ready(part.log, f"{stray} is a link, and what it leads to is not of this run: take it away")
    if not overtaken and not part.rank and all(str(place) == file.path for file, place in places.items()):
        return _Ready(part.log)
    missing = [file for file, place in places.items() if place is None]
    if others := [file.path for file in missing if file.artifact_type != CHECKPOINT_TYPE]:
        return _Ready(part.log, f"{len(others)} files of artifacts are missing, as {others[0]}")
    folder = scratch / part.folder.name
    folder.mkdir(parents=True)
    left = {part.log} if part.offline or not overtaken else {part.log, part.log.with_suffix(SYNC_STATE)}
    for entry in {*part.folder.iterdir()} - left:  # the steps of an online part have gone to the attempt after it
        (folder / entry.name).symlink_to(entry)
    new = folder / f"run-{part.target}.wandb"
    own = wandb_log.OwnRun(part.target, part.rank, view.run_id) if part.rank else None
    wandb_log.rewritten(part.log, new, places.get, view.record.exit_code if overtaken else None, own)
    return _Ready(new, left_out=len({Path(file.path).parent for file in missing}))


def _place(file: wandb_log.StagedFile, view: RunView) -> Path | None:
    """Where a file of an artifact is by now; a log names no others than those that were put there to be sent."""
    if file.artifact_type == CHECKPOINT_TYPE:
        *_, folder, name = ("", *Path(file.path).parts)
        kept = view.layout.checkpoints_dir / folder / name
        safe = re.fullmatch(r"step-\d+", folder) and _is_there(kept, view.layout.checkpoints_dir / folder)
        return kept if safe and file.md5 in ("", _md5(kept)) else None  # an attempt may have saved that step again
    _, found, rest = file.path.rpartition(_STAGED)
    if not found or "/" in rest or file.is_list:
        return None
    moved = view.layout.root / RECORDED / _DATA / _STAGED.strip("/") / rest
    return next((path for path in (Path(file.path), moved) if _is_there(path, path.parent)), None)


def _is_there(path: Path, folder: Path) -> bool:
    """Whether a file is in a folder of that name, and no link, the folder's own included, has led elsewhere."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):
        return False
    return real.is_file() and real.parts[-3:] == (*folder.parts[-2:], path.name)


def _stray(part: Part) -> str:
    """A link among the files of a part: wandb would follow it, and has made none itself. "" where there is none."""
    files = part.folder / "files"
    found = (str(path) for path in (files, *files.rglob("*")) if path.is_symlink())
    return next(found, "")


def _md5(path: Path) -> str:
    """As W&B has it."""
    with path.open("rb") as file:
        return base64.b64encode(hashlib.file_digest(file, _plain_md5).digest()).decode()


def _plain_md5() -> hashlib._Hash:
    return hashlib.md5(usedforsecurity=False)


def _run_wandb(logs: Sequence[Path], env: Mapping[str, str], cwd: Path, timeout_s: float) -> tuple[str, bool]:
    """What `wandb sync` says of these logs, and whether it came to its end in time.

    `cwd` is an empty folder: from its own, wandb takes settings, the server among them, and Python takes modules.
    """
    command = [sys.executable, "-P", "-m", "wandb", "sync", "--include-online", "--include-synced", *map(str, logs)]
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=without_working_directory(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    with _ended(process):
        try:
            return process.communicate(timeout=timeout_s)[0], True
        except subprocess.TimeoutExpired:
            pass
    return process.communicate(timeout=_PARTING_S)[0] if process.stdout and not process.stdout.closed else "", False


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Ends the process and all that it has started when the block is left."""
    import psutil

    try:
        yield
    finally:
        with suppress(psutil.Error):
            family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            for each in family if process.poll() is None else ():
                with suppress(psutil.Error):
                    each.kill()


def sync_runs(views: Sequence[RunView], timeout_s: float, tell: Callable[[Sent], None]) -> bool:
    """Send all of them, within `timeout_s` together; whether nothing is left that should have been sent."""
    deadline = time.monotonic() + timeout_s
    all_well = True
    for view in views:
        done = sync_run(view, os.environ, deadline)
        tell(done)
        all_well = all_well and not done.problem
    return all_well
