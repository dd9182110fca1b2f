"""Ranks in a test's own process: contexts with their files, the store of a worker group, and sharded models."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank.context import RankContext
from ddptrain.rank.output import Emitter
from ddptrain.rank.prepare import shard_model
from tests.unit.specs import make_spec

CPU = torch.device("cpu")


class Gang:
    """A worker group's store, as the worker opens it, and the specs of the ranks that use it."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def spec(self, rank: int, world_size: int, **changes: Any) -> RankSpec:
        """The spec of a rank."""
        where = {"master_addr": "127.0.0.1", "master_port": self.store.port}
        return make_spec(**{**where, "rank": rank, "world_size": world_size, "timeout_s": 20.0, **changes})


class Rank:
    """A context with its events file and staging folder."""

    def __init__(self, folder: Path, spec: RankSpec | None = None, **changes: Any) -> None:
        self.folder = folder
        (folder / "staging").mkdir(parents=True)
        self.file = (folder / "events").open("ab", buffering=0)
        parts = {name: getattr(spec, name) for name in ("rank", "placement", "group")} if spec is not None else {}
        self.spec = make_spec(**{"staging": str(folder / "staging"), "world_size": 1, **parts, **changes})
        self.emitter = Emitter(self.file.fileno())
        self.context = RankContext(self.spec, self.emitter, CPU)

    def events(self, *kinds: type[events.Event]) -> list[Any]:
        """The events of these kinds, by default all but times, after the last checkpoint is complete."""
        self.context.close()
        found = [events.decode(line) for line in (self.folder / "events").read_bytes().splitlines()]
        return [
            event for event in found if (isinstance(event, kinds) if kinds else not isinstance(event, events.Timed))
        ]

    def saved(self) -> dict[str, Path]:
        """The staged files that were announced, by path."""
        return {event.path: self.folder / "staging" / event.staging for event in self.events(events.FileSaved)}


MakeRank = Callable[..., Rank]


@pytest.fixture
def make_rank(tmp_path: Path) -> Iterator[MakeRank]:
    """Makes contexts, each with a folder of its own."""
    made: list[Rank] = []

    def make(spec: RankSpec | None = None, **changes: Any) -> Rank:
        made.append(Rank(tmp_path / f"rank-{len(made)}", spec, **changes))
        return made[-1]

    yield make
    for rank in made:
        rank.context.close(10, failed=True)  # what is written later would use a descriptor of another file
        rank.file.close()


@pytest.fixture
def rank(make_rank: MakeRank) -> Rank:
    return make_rank()


@contextmanager
def full_after(size: int) -> Iterator[None]:
    """Let files grow to `size` bytes only, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- Sharded models: the ranks run one after the other, in a process group that exchanges nothing ---


class Block(nn.Module):
    """A layer whose sizes are no multiples of the number of ranks."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(n, n + 2), nn.Linear(n + 2, n)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Two blocks, a weight that two layers share, and a buffer."""

    def __init__(self, n: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(n) for _ in range(2))
        self.head, self.tail = nn.Linear(n, n), nn.Linear(n, n)
        self.tail.weight = self.head.weight
        self.register_buffer("scale", torch.full((2,), 3.0))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.tail(self.head(x))


@contextmanager
def fake_rank(rank: int, ranks: int) -> Iterator[None]:
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # imports the compiler: 0.8 s of CPU time

    _clear_sharding_prop_cache()  # it contains meshes, which are equal on all ranks
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trained(net: nn.Module) -> torch.optim.Adam:
    """An optimizer of the model after one step, in which the gradient of each value is the value itself."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for parameter in net.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer


def sharded(net: Net, **settings: Any) -> Net:
    ready = shard_model(net, CPU, {"strategy": "fsdp", **settings}, None)
    assert ready is net
    return net
