"""minGPT-ddp's Trainer in miniature: device and ranks from the environment, snapshots, a test epoch."""

import os
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainerConfig:
    max_epochs: int = 1
    batch_size: int = 16
    grad_norm_clip: float = 1.0
    snapshot_path: str = "snapshot.pt"
    save_every: int = 1


@dataclass
class Snapshot:
    model_state: "OrderedDict[str, torch.Tensor]"
    optimizer_state: dict[str, Any]
    finished_epoch: int


class Trainer:
    def __init__(self, config, model, optimizer, train_dataset, test_dataset):
        self.config = config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.train_loader = self._prepare_dataloader(train_dataset)
        self.test_loader = self._prepare_dataloader(test_dataset)
        self.epochs_run = 0
        self.model = model
        self.optimizer = optimizer
        if os.path.exists(config.snapshot_path):
            self._load_snapshot()
        self.model = DDP(self.model)

    def _prepare_dataloader(self, dataset):
        return DataLoader(dataset, batch_size=self.config.batch_size, sampler=DistributedSampler(dataset))

    def _load_snapshot(self):
        snapshot = Snapshot(**torch.load(self.config.snapshot_path))
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.epochs_run = snapshot.finished_epoch

    def _save_snapshot(self, epoch):
        snapshot = Snapshot(self.model.module.state_dict(), self.optimizer.state_dict(), epoch)
        torch.save(asdict(snapshot), self.config.snapshot_path)
        print(f"Snapshot saved at epoch {epoch}")

    def _run_batch(self, source, targets, train):
        with torch.set_grad_enabled(train):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch, dataloader, train):
        dataloader.sampler.set_epoch(epoch)
        for step, (source, targets) in enumerate(dataloader):
            step_type = "Train" if train else "Eval"
            batch_loss = self._run_batch(source, targets, train)
            if step % 4 == 0:
                print(f"[RANK{self.global_rank}] Epoch {epoch} | Iter {step} | {step_type} loss {batch_loss:.5f}")

    def train(self):
        for epoch in range(self.epochs_run + 1, self.config.max_epochs + 1):
            self._run_epoch(epoch, self.train_loader, train=True)
            if self.local_rank == 0 and epoch % self.config.save_every == 0:
                self._save_snapshot(epoch)
            self._run_epoch(epoch, self.test_loader, train=False)
