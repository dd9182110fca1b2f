"""Which rank this process is, and what it does besides training steps, for the line `time` at the end of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.steps.non_training_time import other_time

_LEAST_S = 0.01  # shorter ones are not recorded: ctx.checkpoint may be called after each step


class RankIdentity:
    """The part of a rank's context that its rank spec contains."""

    _spec: RankSpec

    @property
    def run_id(self) -> str:
        """The run's name in the runs folder."""
        return self._spec.run_id

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self._spec.attempt

    @property
    def rank(self) -> int:
        """This process among all processes of the run, from 0 to world_size - 1."""
        return self._spec.rank

    @property
    def world_size(self) -> int:
        """The number of ranks of the run."""
        return self._spec.placement.world_size

    @property
    def local_rank(self) -> int:
        """This process among the run's ranks on its host, from 0."""
        return self._spec.placement.local_rank

    @property
    def local_world_size(self) -> int:
        """The number of the run's ranks on this host."""
        return self._spec.placement.local_world_size

    @property
    def node_rank(self) -> int:
        """This host among the run's hosts, from 0."""
        return self._spec.placement.node_rank

    @property
    def inputs(self) -> Path | None:
        """The folder with the inputs that the driver has prepared; None if the workload prepares nothing."""
        return Path(self._spec.code.inputs) if self._spec.code.inputs else None

    @property
    def resume_folder(self) -> Path | None:
        """The folder of the checkpoint from which this attempt resumes; None if it starts from scratch."""
        return Path(self._spec.checkpointing.resume_from) if self._spec.checkpointing.resume_from else None


class TimedActivities(RankIdentity):
    """The part of a rank's context that measures activities; rank 0 reports them."""

    _emitter: Emitter

    @contextmanager
    def timed(self, activity: str) -> Iterator[None]:
        """Measure a block, as `with ctx.timed("evaluation"):`. "evaluation" appears in where the time of a run went.

        Every rank may use it; what rank 0 measures is recorded in events.jsonl, if it took at least 0.01 s.
        """
        began = time.monotonic()
        try:
            with other_time:
                yield
        finally:
            seconds = time.monotonic() - began
            if self.rank == 0 and seconds >= _LEAST_S:
                with suppress(OSError):  # the disk is full: what the block raised matters more
                    self._emitter.emit(events.Timed(time.time_ns(), activity, seconds))
