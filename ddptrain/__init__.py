"""Trains PyTorch models with DistributedDataParallel on every GPU of a Dask cluster, with one command."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["RankContext", "__version__"]

if TYPE_CHECKING:
    from ddptrain.rank.context import RankContext
else:

    def __getattr__(name: str) -> object:
        # Late, so that commands which train nothing don't wait for torch.
        if name == "RankContext":
            from ddptrain.rank.context import RankContext

            return RankContext
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
