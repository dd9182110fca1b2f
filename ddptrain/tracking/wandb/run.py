"""A run of W&B in this process: opened online or, where that fails, offline; closed with a deadline; never a prompt.

What wandb does by itself is known from its 0.31: a failed `init` keeps the run's id taken until `teardown`, `silent` in
its settings does not silence the login, and its exit handler waits for the server without a deadline. Some private
parts of it are used; tests/unit/tracking/test_wandb_parts.py lists them, and what breaks where one has changed.
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

from ddptrain.protocol.wandb_parts import OPEN, SENT, UNSENT
from ddptrain.redact import hide_credentials
from ddptrain.tracking.wandb.uploads import Uploads

FLUSH_S = 0.25  # to the file, from where nothing is lost when the rank is killed
_KEY = "WANDB_API_KEY"
_SERVICE = "WANDB_SERVICE"  # <version>-<process>-<address>
_LONGEST_REASON = 300
# Variables that are not called as their settings are.
_VARIABLES = {
    "root_dir": "WANDB_DIR",
    "run_name": "WANDB_NAME",
    "run_notes": "WANDB_NOTES",
    "run_tags": "WANDB_TAGS",
    "run_job_type": "WANDB_JOB_TYPE",
}
# Of the first three the environment has had its say, finish() needs the last one.
_ALWAYS_OURS = frozenset({"mode", "run_id", "run_name", "finish_timeout_raises"})
_EXIT_CODES = {"finished": 0, "failed": 1, "preempted": 1, "crashed": 255}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A run to open: `mode` is "online", "shared" or "offline"; `more` are further settings of wandb."""

    mode: str
    run_id: str
    folder: Path
    config: Mapping[str, Any] | None = field(repr=False, default=None)
    init_timeout_s: float = 20.0
    finish_timeout_s: float = 30.0
    more: Mapping[str, Any] = field(default_factory=dict)


def prepare(folder: Path) -> None:
    """Keep all that wandb writes in `folder`, and what it says to itself. The user's own variables stand."""
    if f"-{os.getpid()}-" not in os.environ.get(_SERVICE, ""):
        os.environ.pop(_SERVICE, None)  # the core of a process that this one comes from: it may be gone
    ours = {
        "WANDB_DATA_DIR": folder / "data",
        "WANDB_CACHE_DIR": folder / "cache",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
    }
    for name, value in ours.items():
        os.environ.setdefault(name, str(value))


def open_run(wanted: Wanted, uploads: Uploads) -> wandb.Run:
    """The run, open; `uploads` follows its artifacts. Raises what wandb raises, once nothing is left of the attempt."""
    before = _parts(wanted)
    _no_exit_handler()
    try:
        run = wandb.init(
            settings=wandb.Settings(**settings_for(wanted, os.environ)),
            config=None if wanted.config is None else dict(wanted.config),
            allow_val_change=True,
        )
    except BaseException:
        close_core()
        for part in _parts(wanted) - before:
            shutil.rmtree(part, ignore_errors=True)  # nothing was logged there
        raise
    _never_ask(run, uploads)
    if wanted.mode != "offline":
        _mark(run, OPEN)  # from now on: a rank may be killed
    return run


def _mark(run: wandb.Run, text: str = "") -> None:
    """Say that the server may lack something of an online run, or that it has all of it."""
    with contextlib.suppress(OSError):
        if not run.offline:
            (Path(str(run.settings.sync_dir)) / UNSENT).write_text(text)


def _never_ask(run: wandb.Run, uploads: Uploads) -> None:
    """Have log_artifact not ask the server whether the artifact's type fits, for it would wait for one that is gone.

    These are private parts: without them it asks, and imports half of wandb for it.
    """

    class Silent:
        def _set_artifact_save_handle(self, artifact: wandb.Artifact, handle: object) -> None:
            """It would serve artifact.wait()."""
            uploads.watch(artifact, handle)

    vars(run)["_assert_can_log_artifact"] = lambda artifact: None
    vars(run)["_public_api"] = lambda overrides=None: Silent()


def settings_for(wanted: Wanted, environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings of wandb, less those that the environment has set otherwise: it wins."""
    settings: dict[str, Any] = {
        "mode": wanted.mode,
        "run_id": wanted.run_id,
        "root_dir": str(wanted.folder.parent),  # wandb adds its own name
        "use_dot_wandb": False,
        "init_timeout": wanted.init_timeout_s,
        "finish_timeout": wanted.finish_timeout_s,
        "finish_timeout_raises": True,
        "resume": None if wanted.mode == "shared" else "allow",
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
        **wanted.more,
    }
    return {
        name: value
        for name, value in settings.items()
        if value is not None and (name in _ALWAYS_OURS or _variable(name) not in environ)
    }


def _variable(setting: str) -> str:
    if setting in _VARIABLES:
        return _VARIABLES[setting]
    return f"WANDB__{setting[2:].upper()}" if setting.startswith("x_") else f"WANDB_{setting.upper()}"


def _parts(wanted: Wanted) -> set[Path]:
    kind = "offline-run" if wanted.mode == "offline" else "run"
    folder = Path(os.environ["WANDB_DIR"]) / "wandb" if os.environ.get("WANDB_DIR") else wanted.folder
    suffix = wanted.more.get("x_sync_dir_suffix")
    name = f"{wanted.run_id}-{suffix}" if suffix else wanted.run_id  # as it is: other ranks open theirs meanwhile
    return set(folder.glob(f"{kind}-*-{name}"))


def _no_exit_handler() -> None:
    """Start wandb's core, to be ended by close_core alone.

    Its exit handler would wait for a server that is gone, and say of a run that is being opened that it has finished.
    """
    from wandb.sdk import wandb_setup

    with contextlib.suppress(Exception):  # a private part of wandb: without it, only the exit of a broken run is late
        connection: Any = wandb_setup.singleton().ensure_service()
        connection._cleanup()  # noqa: SLF001


def close_core() -> None:
    """End wandb's own process."""
    with contextlib.suppress(Exception, SystemExit):  # it leaves with the exit code of its process
        wandb.teardown()


def finish(run: wandb.Run, state: str, timeout_s: float) -> bool:
    """End the run, and tell its state; whether all of it is where it belongs. Raises what wandb raises.

    Where that lasts longer than `timeout_s`, what the server lacks stays in the folder, which is marked.
    """
    if state == "preempted":
        run.mark_preempting()
    _mark(run)  # before: this thread may be left behind
    try:
        if not _within(timeout_s, lambda: run.finish(exit_code=_EXIT_CODES.get(state, 1))):
            return False
        _mark(run, SENT)
        complete = True
    except TimeoutError:
        complete = False
    close_core()
    return complete


def _within(timeout_s: float, call: Callable[[], object]) -> bool:
    """Whether the call has ended in time; it goes on otherwise. Raises what it raises.

    wandb's own time-out does not count where artifacts wait for a server that is gone.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ddptrain-wandb-finish", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    return not thread.is_alive()


def reason_of(error: BaseException) -> str:
    """Why wandb has failed, on one line, without secrets."""
    text = " ".join(f"{error}".split()) or type(error).__name__
    text = text.partition(" Consider increasing")[0]
    key = os.environ.get(_KEY)
    if key:
        text = text.replace(key, "<left out>")
    return hide_credentials(text)[:_LONGEST_REASON]
