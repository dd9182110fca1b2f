"""Images in S3 as a dataset: the class of dask-pytorch-ddp."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["S3ImageFolder"]

if TYPE_CHECKING:
    from dask_pytorch_ddp.data import S3ImageFolder
else:

    def __getattr__(name: str) -> object:
        # Imported on first use, because it imports torch and pillow.
        if name == "S3ImageFolder":
            from dask_pytorch_ddp.data import S3ImageFolder

            return S3ImageFolder
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
