"""All errors that ddptrain raises on purpose, with their exit codes.

DdptrainError               3  (the base class; raised itself, it is usually a bug of ddptrain)
├── UsageError              2  the command line is not valid
│   ├── ConfigError         2  the YAML file or a --set is wrong; carries every problem found
│   └── RunNotFound         2  no run, or more than one, has that name
├── RunLocked               6  another process holds the run
├── ClusterError            4  no cluster, too few slots, a worker lost
├── TrainingFailed          1  the training code failed
├── HangDetected            5  no progress in time
├── RunPreempted           75  the run was preempted and has saved a checkpoint
└── Interrupted   128+signal  Ctrl-C, SIGTERM, SIGHUP or SIGQUIT
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


def one_line(error: BaseException | str) -> str:
    """Return the first line of an error's message; of an exception without a message, its type."""
    first = str(error).strip().partition("\n")[0].rstrip()
    return first or (type(error).__name__ if isinstance(error, BaseException) else "")


class ExitCode(IntEnum):
    """The exit codes of the command; scripts and cron jobs rely on them."""

    SUCCEEDED = 0
    TRAINING_FAILED = 1
    USAGE = 2
    INTERNAL = 3
    CLUSTER = 4
    HANG = 5
    LOCKED = 6
    REJECTED = 7  # retrain: the new version did not pass the gate
    DEADLINE = 8  # retrain: out of time; it has saved, and the next start continues
    PREEMPTED = 75
    HUNG_UP = 129  # SIGHUP
    INTERRUPTED = 130
    QUIT = 131  # SIGQUIT
    TERMINATED = 143


# The driver was ended by a signal.
SIGNALLED = frozenset({ExitCode.HUNG_UP, ExitCode.INTERRUPTED, ExitCode.QUIT, ExitCode.TERMINATED})


class DdptrainError(Exception):
    """Base class of all errors of ddptrain. The message says what happened, the bad value, and what to do."""

    exit_code: int = ExitCode.INTERNAL


class UsageError(DdptrainError):
    """The command line is not valid."""

    exit_code = ExitCode.USAGE


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a configuration: its place, its full key, and a hint."""

    where: str
    key: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        hint = f" ({self.hint})" if self.hint else ""
        where = f"{self.where}: " if self.where else ""
        return f"{where}{key}{self.message}{hint}"


class ConfigError(UsageError):
    """The configuration is wrong; `problems` lists all problems in file order."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class RunNotFound(UsageError):
    """No run, or more than one, has that name."""


class RunLocked(DdptrainError):
    """Another process holds the run's lock."""

    exit_code = ExitCode.LOCKED


class ClusterError(DdptrainError):
    """The cluster could not be started, lacks slots, or lost a worker."""

    exit_code = ExitCode.CLUSTER


def limit_error(error: BaseException) -> ClusterError | None:
    """Return the error for a limit of the system that an exception is about; None if it is about something else."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return ClusterError("too many open files: raise the limit, as with `ulimit -n 4096`")
    return None


class TrainingFailed(DdptrainError):
    """The training code failed; the message is the one-line cause."""

    exit_code = ExitCode.TRAINING_FAILED


class HangDetected(DdptrainError):
    """No progress in time; the message names the cause."""

    exit_code = ExitCode.HANG


class CheckpointNotWritten(OSError):
    """In a rank: no attempt to write a checkpoint has succeeded. The run then ends with exit code 4."""


class RunPreempted(DdptrainError):
    """The run was preempted and has saved a checkpoint; it can be resumed."""

    exit_code = ExitCode.PREEMPTED


class Interrupted(DdptrainError):
    """The user or the system asked the driver to stop."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.exit_code = 128 + signum
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
