"""What every scheduler provides: the text that it reads, and how this is installed and removed."""

from __future__ import annotations

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ddptrain.errors import ClusterError, UsageError, one_line
from ddptrain.file_ops import write_atomic
from ddptrain.log import Log
from ddptrain.schedule.job import Job

_TOOL_TIMEOUT_S = 60.0
_log = Log(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """A text for a scheduler. path: the file that it becomes; None for lines of the crontab. name: its file name."""

    name: str
    text: str
    path: Path | None = None
    mode: int = 0o644


class Target(ABC):
    """A scheduler."""

    @abstractmethod
    def parts(self, job: Job, folder: Path | None) -> list[Part]:
        """Return the texts for the job. folder: where the files will be; None for the place that `install` writes to.

        Raises UsageError if the scheduler cannot do what the job asks for.
        """

    def problem(self, parts: Sequence[Part]) -> str:
        """Return what the scheduler's own tool says against the texts; "" for nothing, or if it is not installed."""
        return ""

    @abstractmethod
    def install(self, job: Job, parts: Sequence[Part]) -> list[str]:
        """Install the texts; return what was done, in lines. Raises UsageError, ClusterError: nothing is left then."""

    def remove(self, name: str, files: Sequence[Path]) -> None:
        """Remove an installed schedule; what is missing already is no error. Raises UsageError, ClusterError."""
        delete_files(files)

    def notes(self, job: Job) -> list[str]:
        """Return what the user should know or do, in lines."""
        return []


def run_tool(command: Sequence[str], text: str = "", *, missing: str) -> str:
    """Run a program with `text` as its input; return what it printed.

    missing: what to do if it is not installed. Raises UsageError if it is missing, ClusterError if it fails.
    """
    _log.info("tool started", command=" ".join(command))
    try:
        done = subprocess.run(
            list(command),
            input=text,
            capture_output=True,
            text=True,
            timeout=_TOOL_TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except FileNotFoundError:
        raise UsageError(f"{command[0]} is not installed here: {missing}") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{' '.join(command)} did not end within {_TOOL_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise ClusterError(f"{command[0]} can't be started: {error.strerror}") from None
    if done.returncode:
        reason = one_line(done.stderr) or one_line(done.stdout) or f"exit code {done.returncode}"
        raise ClusterError(f"{' '.join(command)} failed: {reason}")
    return done.stdout


def write_parts(parts: Sequence[Part]) -> None:
    """Write the files, each in one step. Raises UsageError; the files that were written are deleted again."""
    written: list[Path] = []
    for part in parts:
        if part.path is None:
            continue
        try:
            part.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(part.path, part.text.encode(), mode=part.mode)
        except OSError as error:
            delete_files(written)
            raise UsageError(f"cannot write {part.path}: {error.strerror}") from error
        written.append(part.path)


@contextmanager
def files_written(parts: Sequence[Part]) -> Iterator[None]:
    """Write the files for the block; if it raises, the files are again as they were. Raises UsageError."""
    paths = [part.path for part in parts if part.path]
    before = {path: path.read_bytes() if path.is_file() else None for path in paths}
    write_parts(parts)
    try:
        yield
    except BaseException:
        for part in parts:
            old = before[part.path] if part.path else None
            if part.path and old is not None:
                write_atomic(part.path, old, mode=part.mode)
            elif part.path:
                part.path.unlink(missing_ok=True)
        raise


def delete_files(paths: Sequence[Path]) -> None:
    """Delete files; those that are missing are no error. Raises UsageError."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"cannot delete {path}: {error.strerror}") from error


def missing_time_note(job: Job, what: str) -> list[str]:
    """Return a note if a time of the next year does not exist on the clock, and what the scheduler does then."""
    missing = job.schedule.missing_times(datetime.now(UTC))
    return [f"{missing[0]} does not exist in {job.schedule.zone}, as the clocks go forward: {what}"] if missing else []


def sleep_line(job: Job) -> str:
    """Return the shell command that waits for the jitter."""
    return f'sleep "$(shuf -i 0-{job.jitter_s} -n 1)"'
