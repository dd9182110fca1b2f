"""The interface of a display for the driver of a run: the terminal, or the display of one trial of a sweep."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ddptrain.protocol.events import CheckpointSaved, Metrics, Progress
from ddptrain.protocol.worker_notices import SystemSample
from ddptrain.results.run_record import BestRecord


class RunDisplay:
    """Receives everything that happens in a run. No method waits, except `close`.

    A display inherits from this class. Methods that it does not override do nothing.
    """

    def expect(self, world_size: int, offsets: Mapping[int, int] | None = None) -> None:
        """Set the number of ranks; `offsets`: the bytes of their logs that were shown before."""

    def hide(self, ranks: Collection[int]) -> None:
        """Do not show the output of these ranks."""

    def rank_started(self, rank: int, host: str, pid: int) -> None:
        """Show that the rank's process runs."""

    def rank_ended(self, rank: int, ok: bool, stopped: bool = False) -> None:
        """Show that the rank's process has ended."""

    def metrics(self, rank: int, event: Metrics) -> None:
        """Show metrics that the rank logged."""

    def checkpoint(self, rank: int, event: CheckpointSaved) -> None:
        """Show that the rank has written a checkpoint, which is not in the run directory yet."""

    def progress(self, rank: int, event: Progress) -> None:
        """Show progress that the rank reported."""

    def epochs(self, total: int) -> None:
        """Show of how many epochs the run consists."""

    def saved(self, step: int, time_s: float, best: BestRecord | None = None) -> None:
        """Show that the run directory has a new checkpoint since `time_s` (Unix time), and which one is the best."""

    def status(self, text: str, *, announced: bool = False) -> None:
        """Show what the driver waits for; `announced`: a notice says it, so that only a live display shows it."""

    def silence(self, text: str) -> None:
        """Show on a live display for how long a rank has not reported; "": all report."""

    def notice(self, text: str, level: str = "info") -> None:
        """Show a message of ddptrain itself; level is "info", "warning" or "error"."""

    def event(self, obj: Mapping[str, Any]) -> None:
        """Write an object for readers of JSON lines."""

    def system(self, sample: SystemSample) -> None:
        """Show the measured resource use of a host and its ranks."""

    def log_grew(self, rank: int | None = None) -> None:
        """Note that a rank's log file has grown; None: any log may have grown."""

    def close(
        self,
        final_sizes: Mapping[int, int] | None = None,
        summary: Sequence[str] = (),
        last_event: Mapping[str, Any] | None = None,
    ) -> None:
        """Show the end of the run, and wait until it is shown."""
