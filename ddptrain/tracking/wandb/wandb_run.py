"""Opens and closes a run of W&B in this process: online or offline, with time limits, and without ever prompting.

Observed with wandb 0.30 and 0.31: after a failed `init`, the run's id stays taken until `teardown`; the setting
`silent` does not silence the login; wandb's exit handler waits for the server without a limit, so a rank limits it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wandb

from ddptrain.tracking.wandb.credentials import without_credentials
from ddptrain.tracking.wandb.wandb_folders import OPEN, SENT, UNSENT

FLUSH_S = 0.25  # wandb writes rows to its log file this often; rows in the file survive if the rank is killed
_SERVICE = "WANDB_SERVICE"  # <version>-<process>-<address> of wandb's service process
# Settings whose environment variable has a different name.
_VARIABLES = {
    "root_dir": "WANDB_DIR",
    "run_name": "WANDB_NAME",
    "run_notes": "WANDB_NOTES",
    "run_tags": "WANDB_TAGS",
    "run_job_type": "WANDB_JOB_TYPE",
}
# Set even if the environment has a value: tracker.py has already applied the variables of the first three, and
# finish() relies on the last one.
_NOT_FROM_ENVIRONMENT = frozenset({"mode", "run_id", "run_name", "finish_timeout_raises"})
_EXIT_CODES = {"finished": 0, "failed": 1, "preempted": 1, "crashed": 255}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The run to open. `mode` is "online", "shared" or "offline"; `settings` are further settings of wandb."""

    mode: str
    run_id: str
    folder: Path
    config: Mapping[str, Any] | None = field(repr=False, default=None)
    init_timeout_s: float = 20.0
    finish_timeout_s: float = 30.0
    settings: Mapping[str, Any] = field(default_factory=dict)


def prepare(folder: Path) -> None:
    """Make wandb write only into `folder` and print nothing, unless the user's environment variables differ."""
    if f"-{os.getpid()}-" not in os.environ.get(_SERVICE, ""):
        os.environ.pop(_SERVICE, None)  # inherited from a parent process: its service may have ended
    defaults = {
        "WANDB_DATA_DIR": folder / "data",
        "WANDB_CACHE_DIR": folder / "cache",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, str(value))


def open_run(options: RunOptions) -> wandb.Run:
    """Open the run. Raises any exception of wandb, after deleting the folders that wandb has created."""
    before = _run_folders(options)
    settings = settings_for(options, os.environ)
    known = wandb.Settings.model_fields  # older versions lack some settings, which they do not need
    try:
        run = wandb.init(
            settings=wandb.Settings(**{name: value for name, value in settings.items() if name in known}),
            config=None if options.config is None else dict(options.config),
            allow_val_change=True,
        )
    except BaseException:
        stop_service()
        for folder in _run_folders(options) - before:
            shutil.rmtree(folder, ignore_errors=True)  # nothing was logged there
        raise
    _mark(run, OPEN)  # before anything is logged, because the rank may be killed at any time
    return run


def _mark(run: wandb.Run, text: str = "") -> None:
    """Record whether the server has everything of an online run; see wandb_folders.py."""
    with contextlib.suppress(OSError):
        if not run.offline:
            (Path(str(run.settings.sync_dir)) / UNSENT).write_text(text)


def settings_for(options: RunOptions, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings for wandb, without those that an environment variable sets: the variables have priority."""
    settings: dict[str, Any] = {
        "mode": options.mode,
        "run_id": options.run_id,
        "root_dir": str(options.folder.parent),  # wandb adds /wandb
        "use_dot_wandb": False,
        "init_timeout": options.init_timeout_s,
        "finish_timeout": options.finish_timeout_s,
        "finish_timeout_raises": True,
        "resume": None if options.mode == "shared" else "allow",
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
        **options.settings,
    }
    return {
        name: value
        for name, value in settings.items()
        if value is not None and (name in _NOT_FROM_ENVIRONMENT or _variable(name) not in environ)
    }


def _variable(setting: str) -> str:
    if setting in _VARIABLES:
        return _VARIABLES[setting]
    return f"WANDB__{setting[2:].upper()}" if setting.startswith("x_") else f"WANDB_{setting.upper()}"


def _run_folders(options: RunOptions) -> set[Path]:
    """Return the folders of this run, but not those of other ranks, which may open theirs at the same time."""
    kind = "offline-run" if options.mode == "offline" else "run"
    folder = Path(os.environ["WANDB_DIR"]) / "wandb" if os.environ.get("WANDB_DIR") else options.folder
    suffix = options.settings.get("x_sync_dir_suffix")
    return set(folder.glob(f"{kind}-*-{options.run_id}-{suffix}" if suffix else f"{kind}-*-{options.run_id}"))


def stop_service() -> None:
    """Stop wandb's service process."""
    with contextlib.suppress(Exception, SystemExit):  # wandb may exit with the exit code of the process
        wandb.teardown()


def finish(run: wandb.Run, state: str, timeout_s: float, *, complete: bool = True) -> bool:
    """End the run. Return whether everything was sent (offline: written) in time. Raises any exception of wandb.

    `complete`: whether the server has all artifacts.
    """
    if state == "preempted":
        run.mark_preempting()
    _mark(run)  # before finish(), because this thread may be abandoned
    try:
        if not _ends_within(timeout_s, lambda: run.finish(exit_code=_EXIT_CODES.get(state, 1))):
            return False
        if complete:
            _mark(run, SENT)
    except TimeoutError:
        complete = False
    stop_service()
    return complete


def _ends_within(timeout_s: float, call: Callable[[], object]) -> bool:
    """Return whether the call has ended in time; if not, it continues in a thread. Raises the exception of the call.

    wandb's own timeout has no effect while artifacts wait for a server that does not answer.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # it is raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="ddptrain-wandb-finish", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    return not thread.is_alive()


def reason_of(error: BaseException) -> str:
    """Return wandb's error message on one line, without secrets."""
    text = f"{error}" or type(error).__name__
    return without_credentials(text.partition(" Consider increasing")[0], os.environ)
