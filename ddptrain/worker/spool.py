"""The spool: a rank's files on its worker: the log, the events, and the files staged for the driver.

The rank itself writes these files, so nothing is lost if the worker or the driver dies, and a slow reader never blocks
a rank. The worker only watches the sizes of the files.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

READ_LIMIT_BYTES = 8 << 20  # the most bytes in one answer through the scheduler


@dataclass(frozen=True)
class RankSpool:
    """The folder of one rank of one attempt on its worker. Its paths are kept: they are needed many times a second."""

    folder: Path

    @cached_property
    def log(self) -> Path:
        """stdout and stderr as raw bytes, in the order of writing."""
        return self.folder / "log"

    @cached_property
    def events(self) -> Path:
        """Events, one JSON object per line."""
        return self.folder / "events"

    @cached_property
    def staging(self) -> Path:
        """Files and checkpoints that wait until the driver moves them to the run directory."""
        return self.folder / "staging"

    def create(self) -> None:
        """Create the folder (mode 0700) and the empty files."""
        self.folder.mkdir(parents=True, mode=0o700)
        self.staging.mkdir(mode=0o700)
        for path in (self.log, self.events):
            path.touch(mode=0o644, exist_ok=False)

    def sizes(self) -> tuple[int, int]:
        """Return the sizes of the log and the events file in bytes."""
        return os.stat(self.log).st_size, os.stat(self.events).st_size

    def why_unwritable(self) -> str:
        """Return the reason why the files cannot grow, or ""."""
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)  # the rank is a descendant, with the same limit
        if limit != resource.RLIM_INFINITY and max(self.sizes()) >= limit:
            return (
                f"its events or log have reached the limit on the size of files, {limit:,} bytes; raise it: ulimit -f"
            )
        return f"the disk of {self.folder} is full" if os.statvfs(self.folder).f_bavail == 0 else ""


def rank_spool(scratch: Path, run_id: str, attempt: int, rank: int) -> RankSpool:
    """Return the spool of a rank below the worker's scratch folder. Driver and worker compute the same path."""
    return RankSpool(scratch / run_id / f"attempt-{attempt}" / f"rank-{rank}")


def read_chunk(path: Path, offset: int, size_bytes: int) -> bytes:
    """Return up to `size_bytes` bytes of a file from `offset`, at most READ_LIMIT_BYTES."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # faster than a file object: half the time of a short read
    try:
        return os.pread(descriptor, min(size_bytes, READ_LIMIT_BYTES), offset)
    finally:
        os.close(descriptor)


def write_chunk(path: Path, offset: int, data: bytes) -> str:
    """Write bytes of a file from `offset`, in a folder that may be missing; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(data)
    return str(path)
