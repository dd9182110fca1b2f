"""Which rank this process is, and the folders that the driver has prepared for it."""

from __future__ import annotations

from pathlib import Path

from ddptrain.protocol.rank_spec import RankSpec


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
