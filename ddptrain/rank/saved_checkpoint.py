"""A saved checkpoint, the argument of a function that evaluates checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint to evaluate: `path` is its folder on this host. Loading it executes no pickle.

    name: the name in the list of scores, such as petnames@champion. step, epoch, metrics: as they were saved.
    params: the parameters of the workload, from the configuration. data: the source given with --data, or None.
    compared: all checkpoints of this evaluation, this one included, by name. notes: remarks to show with the scores.
    """

    name: str
    path: Path
    step: int
    epoch: float | None
    metrics: Mapping[str, float]
    params: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None
    compared: Mapping[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def weights(self, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
        """Return the tensors of the model, by name."""
        from ddptrain.workloads.saved_weights import read_weights

        return read_weights(self.path, device)

    def load(self, model: torch.nn.Module, device: str | torch.device = "cpu") -> None:
        """Load the weights into a model, which may be wrapped in DDP, and set it to eval mode.

        Raises RuntimeError, which lists missing and unexpected names, if they do not fit.
        """
        import torch

        from ddptrain.rank.checkpoint.file_format import read

        read(self.path, model, None, torch.device(device))
        model.eval()

    def state(self) -> dict[str, Any]:
        """Return what was saved besides the weights: step, epoch, metrics, and in "extra" the workload's own data."""
        from ddptrain.rank.checkpoint.file_format import read_state

        return read_state(self.path)
