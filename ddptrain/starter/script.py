"""Fits a small network, as a script for torchrun. Replace it with your own. To run it: ddptrain train train.yaml."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    """Train the network. Runs in each rank: one process per GPU (or on the CPU)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--snapshot", type=Path, default=Path("snapshot.pt"), help="file to save to and resume from")
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)  # the same model and data on every rank
    inputs = torch.rand(2048, 8)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)  # each rank has its own share
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    network = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    done = 0
    if arguments.snapshot.exists():
        saved = torch.load(arguments.snapshot, map_location=device, weights_only=True)
        network.load_state_dict(saved["model"])
        done = saved["epoch"]
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(done + 1, arguments.epochs + 1):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
            unfinished = arguments.snapshot.with_suffix(".tmp")
            torch.save({"model": network.state_dict(), "epoch": epoch}, unfinished)
            unfinished.replace(arguments.snapshot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
