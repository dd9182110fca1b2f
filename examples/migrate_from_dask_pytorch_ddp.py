"""A notebook for dask_pytorch_ddp, after its migration: only the imports have changed.

python examples/migrate_from_dask_pytorch_ddp.py [FOLDER]
"""

from __future__ import annotations

import json
import logging
import pickle
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from distributed import Client, LocalCluster
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddptrain.compat.dask_pytorch_ddp import dispatch, results  # was: from dask_pytorch_ddp import dispatch, results

NAMES = [
    "Abby",
    "Bella",
    "Biscuit",
    "Buddy",
    "Coco",
    "Cooper",
    "Daisy",
    "Duke",
    "Ginger",
    "Lola",
    "Luna",
    "Max",
    "Milo",
]
CHARACTERS = sorted({character for name in NAMES for character in f"{name.lower()}."})
WINDOW = 4

logger = logging.getLogger("distributed.worker")


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The last characters of a name so far, and the one that follows."""

    def __init__(self) -> None:
        self.samples = []
        for name in NAMES:
            codes = [CHARACTERS.index(".")] * WINDOW + [CHARACTERS.index(character) for character in f"{name.lower()}."]
            self.samples += [(codes[at : at + WINDOW], codes[at + WINDOW]) for at in range(len(codes) - WINDOW)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        before, after = self.samples[index]
        return torch.tensor(before), torch.tensor(after)


class Model(nn.Module):
    """An LSTM that guesses the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), 16)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.output = nn.Linear(32, len(CHARACTERS))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """Scores of all characters, one row a sample."""
        states, _ = self.lstm(self.embedding(codes))
        scores: torch.Tensor = self.output(states[:, -1])
        return scores


def train(handler: results.DaskResultsHandler, epochs: int, learning_rate: float) -> float:
    """The job: every worker runs it, with the process group up."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    data = Windows()
    sampler: DistributedSampler[tuple[torch.Tensor, torch.Tensor]] = DistributedSampler(data)
    optimizer = optim.Adam(model.parameters(), lr=learning_rate)
    loss = torch.tensor(0.0)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for before, after in DataLoader(data, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(before), after)
            loss.backward()
            optimizer.step()
        logger.info("rank %d, epoch %d: loss %.3f", rank, epoch, loss.item())
        told = {"worker": rank, "epoch": epoch, "loss": loss.item()}
        handler.submit_result(f"logs/worker-{rank}/epoch-{epoch}.json", json.dumps(told))
    if rank == 0:
        handler.submit_result("model.pkl", pickle.dumps(model.module.state_dict()))
    return loss.item()


def main(folder: Path) -> None:
    """The notebook's cells."""
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        handler = results.DaskResultsHandler()
        futures = dispatch.run(client, train, handler, epochs=3, learning_rate=0.01, backend="gloo")
        handler.process_results(str(folder), futures)
        losses = [future.result() for future in futures]
    print(f"losses {losses}; results in {folder}:")
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(f"  {path.relative_to(folder)}  {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="migrated-")))
