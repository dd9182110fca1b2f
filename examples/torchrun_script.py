"""Fits a small network, as any script for torchrun does; nothing here knows ddptrain.

torchrun --nproc-per-node 2 examples/torchrun_script.py --epochs 2
ddptrain run --ranks 2 examples/torchrun_script.py --epochs 2
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model: torch.nn.Module, data: TensorDataset, snapshot: str) -> None:
        self.rank = dist.get_rank()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else "cpu"
        self.loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
        self.snapshot = snapshot
        self.epochs_run = 0
        if os.path.exists(snapshot):
            saved = torch.load(snapshot, weights_only=True)
            model.load_state_dict(saved["model"])
            self.epochs_run = saved["epochs_run"]
            print(f"continuing after epoch {self.epochs_run} of {snapshot}")
        self.model = DistributedDataParallel(model.to(self.device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, epochs: int) -> None:
        for epoch in range(self.epochs_run + 1, epochs + 1):
            self.loader.sampler.set_epoch(epoch)
            losses = [
                self.run_batch(inputs.to(self.device), targets.to(self.device)) for inputs, targets in self.loader
            ]
            print(f"rank {self.rank} epoch {epoch}: loss {sum(losses) / len(losses):.6f}")
            if self.rank == 0 and self.snapshot:
                torch.save({"model": self.model.module.state_dict(), "epochs_run": epoch}, self.snapshot)

    def run_batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = mse_loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--snapshot", default="", help="file to save the model in after each epoch, and to go on from")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    inputs = torch.rand(2048, 8)
    network = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    Trainer(network, TensorDataset(inputs, inputs.sin().sum(1, keepdim=True)), arguments.snapshot).train(
        arguments.epochs
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
