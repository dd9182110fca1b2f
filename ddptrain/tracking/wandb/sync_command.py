"""Runs wandb's own command `wandb sync`, which sends transaction logs, in a process with a time limit.

Its exit code does not show whether a log was sent: if it was, there is a file with the suffix SYNCED beside the log.
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
from ddptrain.tracking.wandb.credentials import TOKEN_FILE, without_credentials

# Variables that describe how the run was recorded, not how it is sent.
_NOT_PASSED_ON = frozenset(
    {"WANDB_MODE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SERVICE", "WANDB_SILENT", "WANDB_QUIET"}
)
# Paths that may be relative to the user's working directory. The command runs in another one.
_PATHS = ("WANDB_CONFIG_DIR", "WANDB_CREDENTIALS_FILE", TOKEN_FILE)
_KILL_S = 2.0
# Without the line that names wandb's log file, which is deleted with the folder in which the command ran.
_ERROR = re.compile(r"^(?:.*\bERROR|Error:) +(?!Find detailed error logs)(.+?)\s*$", re.MULTILINE)
_LINK = re.compile(r"/(?P<id>[^/\]\s]+)\] View run .*?at (?P<url>https?://\S+)")


@dataclass(frozen=True, slots=True)
class SyncOutput:
    """wandb's last error message, "" if there is none, and the URLs of the runs that it has sent, by their ids."""

    error: str
    urls: Mapping[str, str]


def sync_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the user's environment for the command: without variables about the recording of runs, with absolute
    paths.
    """
    env = {name: value for name, value in environ.items() if name not in _NOT_PASSED_ON}
    env |= {name: str(Path(env[name]).expanduser().absolute()) for name in _PATHS if env.get(name)}
    return {"WANDB_ERROR_REPORTING": "false", **env, "NO_COLOR": "1"}


def sync_logs(logs: Sequence[Path], env: Mapping[str, str], scratch: Path, timeout_s: float) -> SyncOutput:
    """Send these logs; kill the command after `timeout_s`.

    `scratch` is an empty folder, in which the command runs and writes: from any other working directory the command
    would read settings such as the server, and Python would import modules.
    """
    folders = {name: f"{scratch}/{name}" for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR")}
    for folder in folders.values():
        Path(folder).mkdir()
    folders["TMPDIR"] = str(scratch)  # for wandb's log file, and for all temporary files if wandb is killed
    text, ended = _run(logs, {**env, **folders}, scratch, timeout_s)
    errors = _ERROR.findall(text)
    reason = errors[-1] if errors else "" if ended else f"it was not done in {timeout_s:.0f} s"
    urls = {match["id"]: match["url"] for match in _LINK.finditer(text)}
    return SyncOutput(without_credentials(reason, env), urls)


def _run(logs: Sequence[Path], env: Mapping[str, str], cwd: Path, timeout_s: float) -> tuple[str, bool]:
    """Return the output of the command, and whether it ended in time."""
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
