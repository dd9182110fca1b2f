"""Images in S3 as a dataset: the original one, which still works."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["S3ImageFolder"]

if TYPE_CHECKING:
    from dask_pytorch_ddp.data import S3ImageFolder
else:

    def __getattr__(name: str) -> object:
        # Late: it needs torch and pillow, and boto3 once it is used.
        if name == "S3ImageFolder":
            from dask_pytorch_ddp.data import S3ImageFolder

            return S3ImageFolder
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
