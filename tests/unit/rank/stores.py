"""A worker group's store for tests, as the worker opens it."""

from __future__ import annotations

from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ddptrain.protocol.rank_spec import RankSpec
from tests.unit.specs import make_spec


class Gang:
    """A listening store, and the specs of the ranks that use it."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def spec(self, rank: int, world_size: int, **changes: Any) -> RankSpec:
        """The spec of a rank."""
        where = {"master_addr": "127.0.0.1", "master_port": self.store.port}
        return make_spec(**{**where, "rank": rank, "world_size": world_size, "timeout_s": 20.0, **changes})
