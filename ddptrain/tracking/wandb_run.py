"""Opens and closes the W&B run of a rank: online or offline, with time limits, and without ever prompting.

Observed with wandb 0.30 and 0.31: after a failed `init`, the run's id stays taken until `teardown`; the setting
`silent` does not silence the login; wandb's exit handler waits for the server without a limit, so a rank limits it.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import shutil
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image  # noqa: F401  # wandb would import it later, maybe while the process forks
import wandb

from ddptrain.tracking import protocol as items
from ddptrain.tracking.protocol import Facts, link_or_copy
from ddptrain.tracking.wandb_files import OPEN, SENT, UNSENT, without_credentials

FLUSH_S = 0.25  # wandb writes rows to its log file this often; rows in the file survive if the rank is killed
_FINISH_SHARE = 0.8  # wandb's share of the time for the end; the rest is for queued items and messages
_EXTRA_WAIT_S = 15.0  # added to rank 0's time for opening the run, because rank 0 may start later than other ranks
_SERVICE = "WANDB_SERVICE"  # <version>-<process>-<address> of wandb's service process
# Settings whose environment variable has a different name.
_VARIABLES = {
    "root_dir": "WANDB_DIR",
    "run_name": "WANDB_NAME",
    "run_notes": "WANDB_NOTES",
    "run_tags": "WANDB_TAGS",
    "run_job_type": "WANDB_JOB_TYPE",
}
# Set even if the environment has a value: `settings` has applied the variables of the first three, and finish() relies
# on the last one.
_NOT_FROM_ENVIRONMENT = frozenset({"mode", "run_id", "run_name", "finish_timeout_raises"})
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_EXIT_CODES = {"finished": 0, "failed": 1, "preempted": 1, "crashed": 255}


class RankRun:
    """The W&B run of a rank, from the options, what the driver adds (`facts.from_driver`) and the environment.

    Environment variables have priority. `mode` is rank0, process or shared; offline, shared becomes process.
    """

    def __init__(self, options: Mapping[str, Any], facts: Facts, environ: Mapping[str, str]) -> None:
        self._options, self._facts, self._environ = options, facts, environ
        self.mode = str(facts.from_driver.get("mode") or options.get("mode") or "rank0")
        self.folder = facts.folder / "wandb"
        self.finish_timeout_s = float(options.get("finish_timeout_s", 30.0))
        self.wandb_timeout_s = _FINISH_SHARE * self.finish_timeout_s
        self._init_timeout_s = float(environ.get("WANDB_INIT_TIMEOUT") or 20.0)

    @property
    def prefix(self) -> str:
        """The prefix of the names of metrics if ranks share a run, else ""."""
        return f"rank_{self._facts.rank}/" if self.mode == "shared" else ""

    def open(self) -> tuple[wandb.Run, str]:
        """Open the run. Raises any exception of wandb.

        Also return why the run is offline although online was wanted, or "".
        """
        self._prepare()
        problem = ""
        if self._facts.from_driver.get("online"):
            run, problem = self._open_online()
            if run is not None:
                return run, ""
        if self.mode == "shared":
            self.mode = "process"
        return self._open("offline"), problem

    def _prepare(self) -> None:
        """Make wandb write only into the folder and print nothing, unless the user's environment variables differ."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if f"-{os.getpid()}-" not in os.environ.get(_SERVICE, ""):
            os.environ.pop(_SERVICE, None)  # inherited from a parent process: its service may have ended
        for name, value in (
            ("WANDB_DATA_DIR", f"{self.folder}/data"),
            ("WANDB_CACHE_DIR", f"{self.folder}/cache"),
            ("WANDB_SILENT", "true"),
            ("WANDB_ERROR_REPORTING", "false"),
        ):
            os.environ.setdefault(name, value)

    def _open_online(self) -> tuple[wandb.Run | None, str]:
        """Return the run and "", or None and the reason."""
        waits = self.mode == "shared" and self._facts.world_size > 1
        attempt, timeout_s = self._facts.attempt, self._init_timeout_s + _EXTRA_WAIT_S
        if waits and self._facts.rank and (problem := wait_for_rank_0(attempt, self._environ, timeout_s)):
            return None, problem
        run, problem = None, ""
        try:
            run = self._open("shared" if self.mode == "shared" else "online")
        except (Exception, SystemExit) as error:  # SystemExit: wandb may exit with its service's exit code
            problem = f"W&B has opened no run online ({reason_of(error)})"
        if waits and not self._facts.rank:  # a rank that cannot receive it records offline
            signal_from_rank_0(attempt, self._environ, is_open=run is not None)
        return run, problem

    def _open(self, mode: str) -> wandb.Run:
        """Open the run "online", "shared" or "offline". If that fails, delete the folders that wandb has created."""
        settings, before = self.settings(mode), self._folders(mode)
        known = wandb.Settings.model_fields  # older versions lack some settings, which they do not need
        facts, config = self._facts, None
        if mode != "shared" or not facts.rank:
            names = ("run_id", "attempt", "world_size", "hosts", "rank")
            config = {**facts.config, **{name: getattr(facts, name) for name in names}}
        try:
            run = wandb.init(
                settings=wandb.Settings(**{name: value for name, value in settings.items() if name in known}),
                config=config,
                allow_val_change=True,
            )
        except BaseException:
            stop_service()
            for folder in self._folders(mode) - before:
                shutil.rmtree(folder, ignore_errors=True)  # nothing was logged there
            raise
        _mark(run, OPEN)  # before anything is logged, because the rank may be killed at any time
        return run

    def _run_id(self, mode: str) -> str:
        facts = self._facts
        base = self._environ.get("WANDB_RUN_ID") or str(facts.from_driver.get("id") or facts.run_id)
        return f"{base}-{facts.rank}" if facts.rank and mode != "shared" else base

    def _folders(self, mode: str) -> set[Path]:
        """Return the folders of this run, but not those of other ranks, which may open theirs at the same time."""
        kind, suffix = "offline-run" if mode == "offline" else "run", self.prefix.replace("/", "")
        folder = Path(os.environ["WANDB_DIR"]) / "wandb" if os.environ.get("WANDB_DIR") else self.folder
        return set(folder.glob(f"{kind}-*-{self._run_id(mode)}" + (f"-{suffix}" if mode == "shared" else "")))

    def settings(self, mode: str) -> dict[str, Any]:
        """Return the settings for wandb, without those that an environment variable sets: these have priority."""
        options, facts, rank = self._options, self._facts, f"rank_{self._facts.rank}"
        is_one_of_many = self.mode == "process" or (self.mode == "shared" and mode == "offline")
        name = self._environ.get("WANDB_NAME")
        if is_one_of_many:
            name = f"{name}-{rank}" if name else rank
        settings: dict[str, Any] = {
            "mode": mode,
            "run_id": self._run_id(mode),
            "project": options.get("project") or facts.name,
            "entity": options.get("entity"),
            "run_name": name or facts.run_id,
            "run_tags": tuple(options.get("tags") or ()) or None,
            "run_group": options.get("group") or (facts.run_id if is_one_of_many else None),
            "x_disable_stats": facts.local_rank != 0,
            "root_dir": str(self.folder.parent),  # wandb adds /wandb
            "use_dot_wandb": False,
            "init_timeout": self._init_timeout_s,
            "finish_timeout": self.wandb_timeout_s,
            "finish_timeout_raises": True,
            "resume": None if mode == "shared" else "allow",
            "reinit": "create_new",
            "console": "off",
            "silent": True,
            "quiet": True,
            "symlink": False,
            "disable_git": True,
            "disable_code": True,
            "save_code": False,
            "label_disable": True,
            "x_save_requirements": False,
            "x_transaction_log_flush_interval": FLUSH_S,
        }
        if mode == "shared":
            # Without the suffix, folders of ranks that open their runs in the same second would have the same name.
            settings |= {"x_label": rank, "x_primary": facts.rank == 0, "x_sync_dir_suffix": rank}
            if facts.rank:  # rank 0 names and finishes the run
                settings |= {"x_update_finish_state": False, "run_name": None, "run_tags": None}
        return {
            name: value
            for name, value in settings.items()
            if value is not None and (name in _NOT_FROM_ENVIRONMENT or _variable(name) not in self._environ)
        }


def _variable(setting: str) -> str:
    if setting in _VARIABLES:
        return _VARIABLES[setting]
    return f"WANDB__{setting[2:].upper()}" if setting.startswith("x_") else f"WANDB_{setting.upper()}"


# --- In mode `shared`, rank 0 says through the worker group's TCPStore whether it has opened the run. Waiting for a key
# in the store is not a collective: it has a timeout, and delays no other rank. Neither function raises.


def signal_from_rank_0(attempt: int, environ: Mapping[str, str], *, is_open: bool) -> None:
    """Pass on to the other ranks whether the run is open. Without the store, no rank is waiting any more."""
    with suppress(RuntimeError, KeyError, ValueError):
        _store(environ, 10.0).set(_key(attempt), "open" if is_open else "not open")


def wait_for_rank_0(attempt: int, environ: Mapping[str, str], timeout_s: float) -> str:
    """Wait for rank 0. Return why the run is not open, or ""."""
    try:
        state = _store(environ, timeout_s).get(_key(attempt))
    except (RuntimeError, KeyError, ValueError):
        return f"rank 0 has not opened the W&B run within {timeout_s:g} s"
    return "" if state == b"open" else "rank 0 has opened no W&B run online"


def _key(attempt: int) -> str:
    return f"ddptrain/{attempt}/tracking/wandb"


def _store(environ: Mapping[str, str], timeout_s: float) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = dt.timedelta(seconds=timeout_s)
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    return TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)


# --- the end of a run ---


def _mark(run: wandb.Run, text: str = "") -> None:
    """Record whether the server has everything of an online run; see wandb_files.py."""
    with suppress(OSError):
        if not run.offline:
            (Path(str(run.settings.sync_dir)) / UNSENT).write_text(text)


def finish(run: wandb.Run, state: str, timeout_s: float, *, complete: bool = True) -> bool:
    """End the run. Return whether everything was sent (offline: written) in time. Raises any exception of wandb.

    `complete`: whether the server has all artifacts.
    """
    if state == "preempted":
        run.mark_preempting()
    _mark(run)  # before finish(), because this thread may be abandoned
    errors: list[BaseException] = []

    def end() -> None:
        try:
            run.finish(exit_code=_EXIT_CODES.get(state, 1))
        except BaseException as error:  # it is raised again below
            errors.append(error)

    # wandb's own timeout has no effect while artifacts wait for a server that does not answer.
    thread = threading.Thread(target=end, name="ddptrain-wandb-finish", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors and not isinstance(errors[0], TimeoutError):
        raise errors[0]
    if thread.is_alive():
        return False
    complete = complete and not errors
    if complete:
        _mark(run, SENT)
    stop_service()
    return complete


def stop_service() -> None:
    """Stop wandb's service process."""
    with suppress(Exception, SystemExit):  # wandb may exit with the exit code of the process
        wandb.teardown()


def reason_of(error: BaseException) -> str:
    """Return wandb's error message on one line, without secrets."""
    text = f"{error}" or type(error).__name__
    return without_credentials(text.partition(" Consider increasing")[0], os.environ)


# --- checkpoints and tables as artifacts of an online run, which are sent one after the other, in a thread ---


@dataclass(frozen=True, slots=True)
class _Upload:
    artifact: wandb.Artifact
    aliases: Sequence[str] = ()
    folder: Path | None = None  # the files of a checkpoint, which are deleted once they are sent


class ArtifactUploads:
    """Sends artifacts, and records which ones W&B lacks.

    A checkpoint has hard links below `folder` until it is sent. If the next checkpoint comes while one still waits
    for an earlier upload, it replaces the waiting one, so that a slow server does not fill the disk.
    """

    def __init__(self, run: wandb.Run, run_id: str, folder: Path) -> None:
        self._run, self._run_id, self._folder = run, run_id, folder
        self._waiting: deque[_Upload] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._count = self._replaced = 0
        self._errors: list[str] = []
        shutil.rmtree(folder, ignore_errors=True)  # the links of a rank that was killed
        self._thread = threading.Thread(target=self._send_all, name="ddptrain-wandb-artifacts", daemon=True)
        self._thread.start()

    def put(self, artifact: wandb.Artifact, aliases: Sequence[str] = ()) -> None:
        """Send an artifact later."""
        self._add(_Upload(artifact, aliases))

    def put_checkpoint(self, item: items.Checkpoint) -> None:
        """Send a checkpoint later; its files may be deleted when this method has returned. Raises OSError."""
        folder = self._folder / f"step-{item.step}-{self._count}"
        folder.mkdir(parents=True)
        for path in item.folder.iterdir():
            link_or_copy(path, folder / path.name)
        name = artifact_name(f"checkpoint_{self._run_id}")
        artifact = wandb.Artifact(name, type="model", metadata={"step": item.step, **item.metrics})
        for path in sorted(folder.iterdir()):  # not copied: they must exist until they are sent
            artifact.add_file(str(path), name=path.name, policy="immutable", skip_cache=True)
        self._add(_Upload(artifact, ["latest", f"step-{item.step}"], folder))

    def _add(self, upload: _Upload) -> None:
        with self._changed:
            self._count += 1
            for other in [each for each in self._waiting if each.folder and upload.folder]:
                self._waiting.remove(other)
                self._replaced += 1
                _delete(other)
            self._waiting.append(upload)
            self._changed.notify()

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                upload = self._waiting.popleft()
            try:
                # Artifact.wait alone reports that the server has refused an artifact.
                self._run.log_artifact(upload.artifact, aliases=[*upload.aliases]).wait()
            except Exception as error:  # whatever wandb raises
                self._errors.append(reason_of(error))
            _delete(upload)

    def finish(self, timeout_s: float) -> bool:
        """Wait until everything is sent. Return whether it was, within the time."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def delete_files(self) -> None:
        """Delete all links."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def problem(self) -> str:
        """What the server lacks for good, in one line, or ""."""
        missing = []
        if self._replaced:
            missing.append(f"checkpoints ({self._replaced}) that were replaced by newer ones before they were sent")
        if self._errors:
            missing.append(f"{len(self._errors)} of {self._count} artifacts; the last error: {self._errors[-1]}")
        return f"W&B lacks {' and '.join(missing)}" if missing else ""


def _delete(upload: _Upload) -> None:
    if upload.folder is not None:
        shutil.rmtree(upload.folder, ignore_errors=True)


def to_image(item: items.Image) -> wandb.Image:
    """Return the image; wandb copies its file when it is logged."""
    return wandb.Image(str(item.path), caption=item.caption or None)


def to_table(item: items.Table, max_rows: int) -> wandb.Table:
    """Return the first rows of a table, with their images."""
    rows = [[_cell(value) for value in row] for row in item.rows[:max_rows]]
    return wandb.Table(columns=list(item.columns), data=rows)


def _cell(value: Any) -> Any:
    if isinstance(value, items.Image):
        return to_image(value)
    return value.item() if isinstance(value, np.generic) else value


def to_table_artifact(item: items.Table, max_rows: int, run_id: str, rank: int) -> wandb.Artifact:
    """Return an artifact `<table>_<run>` with a copy of the table; `<table>_<run>_rank_<rank>` if it is not rank 0's.

    An artifact that shares the logged table would refer to another artifact, which the server may not have yet.
    """
    suffix = f"_rank_{rank}" if rank else ""
    artifact = wandb.Artifact(
        artifact_name(f"{item.name}_{run_id}{suffix}"), type=artifact_name(item.name), metadata={"step": item.step}
    )
    artifact.add(to_table(item, max_rows), artifact_name(item.name))
    return artifact


def artifact_name(text: str) -> str:
    """Return the text as a valid name of W&B, with "_" in place of other characters, at most 128 characters."""
    return _NOT_IN_NAMES.sub("_", text)[:128]
