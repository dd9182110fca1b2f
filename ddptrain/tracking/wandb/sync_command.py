"""Runs wandb's own command `wandb sync`, which sends transaction logs, in a process with a time limit.

Its exit code does not tell whether a log was sent. A file beside the log does: its suffix is SYNCED.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ddptrain.protocol.exec_env import without_working_directory
from ddptrain.redact import hide_credentials
from ddptrain.tracking.wandb.credentials import KEY, TOKEN_FILE

# Variables that describe how the run was recorded, not how it is sent.
_NOT_PASSED_ON = frozenset(
    {"WANDB_MODE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SERVICE", "WANDB_SILENT", "WANDB_QUIET"}
)
# Paths that may be relative to the user's working directory. The command runs in another one.
_PATHS = ("WANDB_CONFIG_DIR", "WANDB_CREDENTIALS_FILE", TOKEN_FILE)
_KILL_S = 2.0
_MAX_REASON = 300  # characters of wandb's error message
# Not the line that names a log file: the file is deleted with the folder in which the command ran.
_ERROR = re.compile(r"^(?:.*\bERROR|Error:) +(?!Find detailed error logs)(.+?)\s*$", re.MULTILINE)
_LINK = re.compile(r"/(?P<id>[^/\]\s]+)\] View run .*?at (?P<url>https?://\S+)")


@dataclass(frozen=True, slots=True)
class SyncOutput:
    """wandb's last error message, "" if there is none, and the URLs of the runs that it has sent, by their ids."""

    error: str
    urls: Mapping[str, str]


def sync_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The user's environment for the command: without how runs are recorded, with absolute paths."""
    env = {name: value for name, value in environ.items() if name not in _NOT_PASSED_ON}
    env |= {name: str(Path(env[name]).expanduser().absolute()) for name in _PATHS if env.get(name)}
    return {"WANDB_ERROR_REPORTING": "false", **env, "NO_COLOR": "1"}


def sync_logs(logs: Sequence[Path], env: Mapping[str, str], scratch: Path, timeout_s: float) -> SyncOutput:
    """Sends these logs, and ends the command after `timeout_s`.

    `scratch` is an empty folder, in which the command runs and writes: it would read settings, the server among them,
    from its working directory, and Python would import modules from there.
    """
    own = {name: f"{scratch}/{name}" for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR")}
    for folder in own.values():
        Path(folder).mkdir()
    own["TMPDIR"] = str(scratch)  # where it leaves its log file, and everything if it is killed
    text, ended = _run(logs, {**env, **own}, scratch, timeout_s)
    errors = _ERROR.findall(text)
    reason = errors[-1] if errors else "" if ended else f"it was not done in {timeout_s:.0f} s"
    if key := env.get(KEY):
        reason = reason.replace(key, "<left out>")
    urls = {match["id"]: match["url"] for match in _LINK.finditer(text)}
    return SyncOutput(hide_credentials(reason)[:_MAX_REASON], urls)


def _run(logs: Sequence[Path], env: Mapping[str, str], cwd: Path, timeout_s: float) -> tuple[str, bool]:
    """What the command prints, and whether it ended in time."""
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
    with _killed_at_end(process), suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=timeout_s)[0], True
    return process.communicate(timeout=_KILL_S)[0] if process.stdout and not process.stdout.closed else "", False


@contextmanager
def _killed_at_end(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kills the process and everything that it has started when the block is left, if it still runs."""
    import psutil

    try:
        yield
    finally:
        with suppress(psutil.Error):
            family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            for each in family if process.poll() is None else ():
                with suppress(psutil.Error):
                    each.kill()
