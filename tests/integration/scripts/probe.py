"""Tells how a script finds itself; torch is imported late, for spawned children run this file, too."""

import json
import multiprocessing
import os
import pickle
import sys
from dataclasses import dataclass


@dataclass
class Point:
    x: int


def double(point):
    return Point(2 * point.x)


class Squares:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index * index


def in_children(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.map(double, [Point(1), Point(2)])


def main():
    import beside  # of this script's folder
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group()
    loader = torch.utils.data.DataLoader(Squares(), batch_size=5, num_workers=1)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    told = {
        "argv": sys.argv,
        "path": sys.path[0],
        "beside": beside.NAME,
        "file": __file__,
        "package": __package__,
        "cwd": os.getcwd(),
        "pickled": pickle.loads(pickle.dumps(Point(3))).x,
        "fork": [point.x for point in in_children("fork")],
        "spawn": [point.x for point in in_children("spawn")],
        "loaded": sum(int(batch.sum()) for batch in loader),
        "sharded": type(model.weight).__name__,
        "env": {name: os.environ.get(name) for name in NAMES},
    }
    with open(f"{sys.argv[-1]}/probe-{dist.get_rank()}.json", "w") as file:
        json.dump(told, file)
    dist.destroy_process_group()


NAMES = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
]

if __name__ == "__main__":
    main()
