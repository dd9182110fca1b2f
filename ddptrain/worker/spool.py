"""A rank's files on its worker: the log and the events that it appends to, and what it stages for the driver.

The rank writes straight into these files, so nothing is lost when a worker or a driver dies, and a slow reader never
holds a rank up. The worker only watches how far they have grown.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

READ_LIMIT_BYTES = 8 << 20  # one answer through the scheduler


@dataclass(frozen=True, slots=True)
class RankSpool:
    """Where one rank of one attempt writes on this worker."""

    folder: Path

    @property
    def log(self) -> Path:
        """stdout and stderr, in order, as raw bytes."""
        return self.folder / "log"

    @property
    def events(self) -> Path:
        """One JSON event a line."""
        return self.folder / "events"

    @property
    def staging(self) -> Path:
        """Files and checkpoints that wait for the driver."""
        return self.folder / "staging"

    def create(self) -> None:
        """Make the folder (0700) and the empty files."""
        self.staging.mkdir(parents=True, mode=0o700)
        for path in (self.log, self.events):
            path.touch(mode=0o644, exist_ok=False)

    def sizes(self) -> tuple[int, int]:
        """Bytes in the log and in the events file."""
        return os.stat(self.log).st_size, os.stat(self.events).st_size


def rank_spool(scratch: Path, run_id: str, attempt: int, rank: int) -> RankSpool:
    """The spool of a rank below the worker's scratch folder; driver and worker compute the same path."""
    return RankSpool(scratch / run_id / f"attempt-{attempt}" / f"rank-{rank}")


def read_chunk(path: Path, offset: int, size_bytes: int) -> bytes:
    """Up to `size_bytes` of a file from `offset`."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(min(size_bytes, READ_LIMIT_BYTES))
