"""Trains PyTorch models with DistributedDataParallel on every GPU of a Dask cluster, with one command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddptrain.version import __version__

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
    from ddptrain.rank.context import RankContext, context
    from ddptrain.rank.evaluation import SavedCheckpoint
    from ddptrain.rank.huggingface import HuggingFaceCallback
else:
    _MODULES = {  # of the names that are not errors
        **dict.fromkeys(("Run", "launch", "load_model"), "ddptrain.api"),
        "RankContext": "ddptrain.rank.context",
        "context": "ddptrain.rank.context",
        "HuggingFaceCallback": "ddptrain.rank.huggingface",
        "SavedCheckpoint": "ddptrain.rank.evaluation",
    }

    def __getattr__(name: str) -> object:
        # Imported on first use, so that commands that do not train do not wait for torch.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_MODULES.get(name, "ddptrain.errors")), name)
