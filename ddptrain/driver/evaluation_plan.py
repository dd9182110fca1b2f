"""The plan of a run that scores checkpoints instead of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddptrain.results.checkpoints.verification import VerifiedCheckpoint

RANK_FUNCTION = "ddptrain.rank.evaluation:evaluate"
STAGE = "evaluate"  # marks the events of such a run in JSON output


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """The checkpoints to score, by name, and the function that scores them.

    function: as module:function, called on all ranks. prepare: the function that writes the held-out data to the run's
    inputs, or "", and `request` its argument. data: a source in place of the held-out data.
    """

    function: str
    checkpoints: Mapping[str, VerifiedCheckpoint]
    prepare: str = ""
    request: Mapping[str, object] = field(default_factory=dict)
    data: str | None = None

    @property
    def description(self) -> str:
        """The names of the checkpoints, for messages."""
        return " and ".join(self.checkpoints)

    def rank_params(self, params: Mapping[str, Any], folders: Mapping[str, str]) -> dict[str, Any]:
        """Return the arguments of the rank's function. `folders`: where the rank finds each checkpoint."""
        targets = [
            {
                "name": name,
                "folder": folders[name],
                "step": checkpoint.step,
                "epoch": checkpoint.epoch,
                "metrics": checkpoint.metrics,
            }
            for name, checkpoint in self.checkpoints.items()
        ]
        return {"function": self.function, "targets": targets, "params": dict(params), "data": self.data}
