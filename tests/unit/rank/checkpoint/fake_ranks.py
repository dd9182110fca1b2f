"""Ranks of a sharded model, one after the other in this process: a process group that exchanges nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddptrain.rank.prepare import shard_model

CPU = torch.device("cpu")


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
