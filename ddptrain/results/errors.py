"""Errors of run directories. Errors of object stores are in storage/store.py."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddptrain.errors import DdptrainError, ExitCode


class ResultsError(DdptrainError):
    """The run directory can't be written or read: disk full, no permission, not a folder."""

    exit_code = ExitCode.CLUSTER


class CheckpointDamaged(ResultsError):
    """A checkpoint does not have the size or hash that its event or manifest states; nothing visible has changed."""


class FileDamaged(ResultsError):
    """A staged file does not have the size or hash that its event states; nothing visible has changed."""


class UnsafePath(ResultsError):
    """The training code asked for a path outside its run directory, or one that some file systems can't store."""

    exit_code = ExitCode.TRAINING_FAILED


_ADVICE = {
    errno.ENOSPC: "; free some space, or choose another folder with --runs-dir",
    errno.EDQUOT: "; free some space, or choose another folder with --runs-dir",
    errno.EFBIG: "; the limit on the size of a file is too low for it: ulimit -f unlimited",
    errno.EACCES: "; choose a folder that you may write to with --runs-dir",
    errno.EROFS: "; choose a folder that you may write to with --runs-dir",
}


@contextmanager
def results_errors(path: Path, action: str = "write") -> Iterator[None]:
    """Convert an OSError of the block into a ResultsError: "cannot ACTION PATH: CAUSE", and what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "")
        raise ResultsError(f"cannot {action} {path}: {error.strerror or error}{advice}") from error
