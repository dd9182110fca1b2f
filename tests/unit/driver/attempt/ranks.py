"""Ranks of an attempt, as the driver knows them, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddptrain.clusters.scheduler.slots import Slot
from ddptrain.driver.ranks import Rank, RankPlace
from ddptrain.protocol.rank_spec import Placement
from tests.unit.specs import make_spec


def running(rank: int, host: str = "", *, spec: dict[str, Any] | None = None, **more: Any) -> Rank:
    """A rank that was submitted at 100 s, on a host of its own unless one is named."""
    name = host or f"h{rank}"
    place = RankPlace(rank, Placement(1, 0, 1, rank, 0), Slot(f"tcp://{name}", name, 0, False, True), name, Path("/s"))
    return Rank(make_spec(rank=rank, **(spec or {})), place, **{"submitted_at": 100.0, **more})
