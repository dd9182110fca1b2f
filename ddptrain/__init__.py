"""Trains PyTorch models with DistributedDataParallel on every GPU of a Dask cluster, with one command."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
_ERRORS = (
    "ClusterError",
    "ConfigError",
    "DdptrainError",
    "HangDetected",
    "Interrupted",
    "RunLocked",
    "RunNotFound",
    "RunPreempted",
    "TrainingFailed",
    "UsageError",
)
__all__ = [
    "ClusterError",
    "ConfigError",
    "DdptrainError",
    "HangDetected",
    "HuggingFaceCallback",
    "Interrupted",
    "RankContext",
    "Run",
    "RunLocked",
    "RunNotFound",
    "RunPreempted",
    "SavedCheckpoint",
    "TrainingFailed",
    "UsageError",
    "__version__",
    "context",
    "launch",
    "load_model",
]

if TYPE_CHECKING:
    from ddptrain.api import Run, launch, load_model
    from ddptrain.errors import (
        ClusterError,
        ConfigError,
        DdptrainError,
        HangDetected,
        Interrupted,
        RunLocked,
        RunNotFound,
        RunPreempted,
        TrainingFailed,
        UsageError,
    )
    from ddptrain.rank.context import RankContext
    from ddptrain.rank.current_context import context
    from ddptrain.rank.huggingface import HuggingFaceCallback
    from ddptrain.rank.saved_checkpoint import SavedCheckpoint
else:

    def __getattr__(name: str) -> object:
        # Imported on first use, so that commands that do not train do not wait for torch.
        if name == "RankContext":
            from ddptrain.rank.context import RankContext

            return RankContext
        if name == "context":
            from ddptrain.rank.current_context import context

            return context
        if name == "HuggingFaceCallback":
            from ddptrain.rank.huggingface import HuggingFaceCallback

            return HuggingFaceCallback
        if name == "SavedCheckpoint":
            from ddptrain.rank.saved_checkpoint import SavedCheckpoint

            return SavedCheckpoint
        if name in ("Run", "launch", "load_model"):
            from ddptrain import api

            return getattr(api, name)
        if name in _ERRORS:
            from ddptrain import errors

            return getattr(errors, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
