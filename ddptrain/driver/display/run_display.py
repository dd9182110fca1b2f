"""What the driver of a run needs of a display: the terminal's, or that of one trial of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ddptrain.protocol.events import CheckpointSaved, Metrics, Progress
from ddptrain.protocol.worker_notices import SystemSample


class RunDisplay(Protocol):
    """Takes what happens in a run. No method waits, except `close`."""

    def expect(self, world_size: int, offsets: Mapping[int, int] | None = None) -> None:
        """The number of ranks is known; `offsets`: bytes of their logs that were shown before."""

    def rank_started(self, rank: int, host: str, pid: int) -> None:
        """The rank's process runs."""

    def rank_ended(self, rank: int, ok: bool, stopped: bool = False) -> None:
        """The rank's process has ended."""

    def metrics(self, rank: int, event: Metrics) -> None:
        """The rank logged metrics."""

    def checkpoint(self, rank: int, event: CheckpointSaved) -> None:
        """The rank has written a checkpoint, which is not in the run directory yet."""

    def progress(self, rank: int, event: Progress) -> None:
        """The rank reported progress."""

    def status(self, text: str) -> None:
        """What the driver waits for."""

    def notice(self, text: str, level: str = "info") -> None:
        """A message of ddptrain itself; level is "info", "warning" or "error"."""

    def event(self, obj: Mapping[str, Any]) -> None:
        """An object for readers of JSON lines."""

    def system(self, sample: SystemSample) -> None:
        """The use of a host and its ranks was measured."""

    def log_grew(self, rank: int | None = None) -> None:
        """A rank's log file has grown; None: any may have."""

    def close(
        self,
        final_sizes: Mapping[int, int] | None = None,
        summary: Sequence[str] = (),
        last_event: Mapping[str, Any] | None = None,
    ) -> None:
        """The run has ended."""
