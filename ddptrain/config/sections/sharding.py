"""The part of the `prepare` section that distributes a model over ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ddptrain.config.types import FilledText, Strict


class ShardingConfig(Strict):
    """How ranks share a model."""

    strategy: Literal["ddp", "fsdp", "hybrid"] = Field(
        default="ddp",
        description="ddp: each rank has the whole model; fsdp: all ranks share it; hybrid: the ranks of each host do.",
    )
    shard: list[FilledText] = Field(
        default_factory=list,
        description="Classes of layers that are gathered one at a time, as [Block]; by default the blocks of the "
        "model's ModuleLists.",
    )
    activation_checkpointing: list[FilledText] = Field(
        default_factory=list,
        description="Classes of layers that are computed again in the backward pass, which saves memory, as [Block].",
    )
