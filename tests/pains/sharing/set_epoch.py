"""The same order in each epoch."""

from __future__ import annotations

from tests.pains.problem import DDPTRAIN, TORCHRUN, YAML, Problem, Show, run

PROBLEM = Problem(
    name="set-epoch",
    title="The samples come in the same order in each epoch",
    happens=(
        "`DistributedSampler` shuffles by the number of the epoch, which it does not know unless the code calls "
        "`set_epoch`."
    ),
    threads=("pytorch/pytorch#31771", "pytorch/pytorch#31232"),
    files={
        "train.py": """
import torch

import ddptrain


def train(ctx: ddptrain.RankContext) -> None:
    loader = ctx.loader(torch.arange(12), batch_size=1)
    for epoch in ctx.epochs(3):
        print("epoch", epoch, [int(batch) for batch in loader], flush=True)
""",
        "train.yaml": YAML,
    },
    peer_files={
        "train.py": """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
data = torch.arange(12)
loader = DataLoader(data, batch_size=1, sampler=DistributedSampler(data, shuffle=True))
for epoch in range(1, 4):
    if dist.get_rank() == 0:
        print("epoch", epoch, [int(batch) for batch in loader], flush=True)
""",
    },
    peer=Show(run(TORCHRUN), must=(r"epoch 1 (\[.*\])\nepoch 2 \1\nepoch 3 \1",), keep=("^epoch",)),
    ours=Show(
        run(DDPTRAIN),
        must=(r"rank 0\] epoch 3",),
        never=(r"rank 0\] epoch 1 (\[.*\])\n\[rank 0\] epoch 2 \1",),
        keep=(r"rank 0\] epoch", "^run "),
    ),
    avoided=(
        "`ctx.loader` gets the epoch from `ctx.epochs`, and shuffles each epoch anew, in the same way in each "
        "run: see [Your function](start/function.md)."
    ),
    equal="`sampler.set_epoch(epoch)` at the beginning of each epoch does it in torch.",
)
