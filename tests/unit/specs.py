"""A RankSpec for tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from ddptrain.protocol.rank_spec import RankSpec

_SPEC = RankSpec(
    run_id="r-1",
    attempt=1,
    rank=0,
    world_size=4,
    local_rank=0,
    local_world_size=2,
    node_rank=0,
    slot=0,
    workload="m:f",
    params={},
    dist_backend="gloo",
    dist_timeout_s=60.0,
    grace_s=1.0,
    every_epochs=1,
    every_steps=None,
    every_s=None,
    workdir="/",
    master_addr="10.0.0.1",
    master_port=1234,
)


def make_spec(**changes: Any) -> RankSpec:
    """Rank 0 of 4, two a host, with changes."""
    return dataclasses.replace(_SPEC, **changes)
