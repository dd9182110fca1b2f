"""Runs wandb in a process with a time limit: its own command `wandb sync`, and artifact_process.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddptrain.protocol.exec_env import without_working_directory
from ddptrain.tracking.wandb.credentials import BASE_URL, TOKEN_FILE, without_credentials
from ddptrain.tracking.wandb.wandb_folders import RunPart

# Variables that describe how the run was recorded, not how it is sent.
_NOT_PASSED_ON = frozenset(
    {
        *("WANDB_MODE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SERVICE", "WANDB_SILENT", "WANDB_QUIET"),
        *("WANDB_NAME", "WANDB_NOTES", "WANDB_TAGS", "WANDB_RUN_GROUP", "WANDB_JOB_TYPE", "WANDB_PROJECT"),
    }
)
# Paths that may be relative to the user's working directory. The processes run in another one.
_PATHS = ("WANDB_CONFIG_DIR", "WANDB_CREDENTIALS_FILE", TOKEN_FILE)
_KILL_S = 2.0
_NOTICE_S = 5.0
# Without the line that names wandb's log file, which is deleted with the folder in which the command ran.
_ERROR = re.compile(r"^(?:.*\bERROR|Error:) +(?!Find detailed error logs)(.+?)\s*$", re.MULTILINE)
_LINK = re.compile(r"\bhttps?://\S+/runs/[^/\s]+")


@dataclass(frozen=True, slots=True)
class RunArtifacts:
    """What artifact_process.py logs as artifacts of the W&B run `run_id`, from the run directory `root`.

    Empty texts and None leave a property of the W&B run as it is. checkpoints: step, metrics and the paths of files;
    tables: name, step and path. Paths are relative to `root`.
    """

    run_id: str
    project: str
    entity: str
    name: str
    group: str
    exit_code: int | None
    root: str
    ddptrain_run: str
    rank: int
    table_rows: int
    checkpoints: Sequence[tuple[int, Mapping[str, float], Sequence[str]]]
    tables: Sequence[tuple[str, int | None, str]]


@dataclass(frozen=True, slots=True)
class SyncOutput:
    """wandb's last error message, "" if there is none, and the URL of the run, "" if it is not known."""

    error: str
    url: str


@dataclass(frozen=True, slots=True)
class WandbProcesses:
    """Starts the processes. `env` is their environment; `notice` gets a line when one takes longer than 5 s."""

    env: Mapping[str, str]
    notice: Callable[[str], None]

    def sync(self, part: RunPart, scratch: Path, timeout_s: float) -> SyncOutput:
        """Send the transaction log of a part with `wandb sync`.

        Its exit code does not show whether the log was sent: if it was, there is a file with the suffix SYNCED.
        """
        words = ["wandb", "sync", "--include-online", "--include-synced"]
        words += ["--id", part.target] if part.target != part.run_id else []
        return self._run([*words, str(part.log)], scratch, timeout_s)

    def log_artifacts(self, artifacts: RunArtifacts, scratch: Path, timeout_s: float) -> SyncOutput:
        """Log these artifacts. An error means that not all of them were logged."""
        request = json.dumps({**asdict(artifacts), "timeout_s": timeout_s})
        return self._run(["ddptrain.tracking.wandb.artifact_process"], scratch, timeout_s, request)

    def _run(self, module: Sequence[str], scratch: Path, timeout_s: float, stdin: str = "") -> SyncOutput:
        """Run a module; kill it after `timeout_s`.

        `scratch` is a folder in which it runs and writes: from any other working directory wandb would read settings
        such as the server, and Python would import modules.
        """
        env: dict[str, Any] = {**self.env, "TMPDIR": str(scratch)}  # for wandb's log file, and what it leaves if killed
        for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
            env[name] = f"{scratch}/{name}"
            Path(env[name]).mkdir(exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *module],
            cwd=scratch,
            env=without_working_directory(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        text, ended = "", False
        with _killed_at_end(process), suppress(subprocess.TimeoutExpired):
            text, ended = self._communicate(process, stdin, timeout_s), True
        if not ended and process.stdout and not process.stdout.closed:
            text = process.communicate(timeout=_KILL_S)[0]
        errors = _ERROR.findall(text)
        reason = errors[-1] if errors else "" if ended else f"it was not done in {timeout_s:.0f} s"
        urls = _LINK.findall(text)
        return SyncOutput(without_credentials(reason, self.env), urls[-1] if urls else "")

    def _communicate(self, process: subprocess.Popen[str], stdin: str, timeout_s: float) -> str:
        """Return the output. Raises TimeoutExpired."""
        try:
            return process.communicate(stdin, timeout=min(_NOTICE_S, timeout_s))[0]
        except subprocess.TimeoutExpired:
            if timeout_s <= _NOTICE_S:
                raise
        server = self.env.get(BASE_URL) or "W&B"
        self.notice(f"waiting for {server} to take the data, for {timeout_s - _NOTICE_S:.0f} s at most (--timeout)")
        return process.communicate(timeout=timeout_s - _NOTICE_S)[0]


def sync_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the user's environment for the processes: without variables about the recording of runs, with absolute
    paths.
    """
    env = {name: value for name, value in environ.items() if name not in _NOT_PASSED_ON}
    env |= {name: str(Path(env[name]).expanduser().absolute()) for name in _PATHS if env.get(name)}
    return {"WANDB_ERROR_REPORTING": "false", **env, "NO_COLOR": "1"}


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
