"""In the shape of torch elastic's ImageNet example, on fake data: a State that ranks agree on, meters, validation."""

import argparse
import io
import os
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.utils.data import ElasticDistributedSampler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser(description="PyTorch Elastic ImageNet Training")
parser.add_argument("-j", "--workers", default=0, type=int)
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("-b", "--batch-size", default=8, type=int)
parser.add_argument("--lr", "--learning-rate", default=0.1, type=float)
parser.add_argument("--dist-backend", default="gloo", choices=["nccl", "gloo"])
parser.add_argument("--checkpoint-file", default="checkpoint.pth.tar")


class FakeImages(Dataset):
    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 4, (samples,), generator=generator)
        self.images = torch.randn(samples, 3, 8, 8, generator=generator) + self.labels.view(-1, 1, 1, 1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class State:
    def __init__(self, model, optimizer):
        self.epoch = -1
        self.best_acc1 = 0.0
        self.model = model
        self.optimizer = optimizer

    def capture_snapshot(self):
        return {
            "epoch": self.epoch,
            "best_acc1": self.best_acc1,
            "state_dict": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def apply_snapshot(self, obj):
        self.epoch = obj["epoch"]
        self.best_acc1 = obj["best_acc1"]
        self.model.load_state_dict(obj["state_dict"])
        self.optimizer.load_state_dict(obj["optimizer"])

    def save(self, f):
        torch.save(self.capture_snapshot(), f)

    def load(self, f):
        self.apply_snapshot(torch.load(f, weights_only=True))


@contextmanager
def tmp_process_group(backend):
    cpu_pg = dist.new_group(backend=backend)
    try:
        yield cpu_pg
    finally:
        dist.destroy_process_group(cpu_pg)


def load_checkpoint(checkpoint_file, model, optimizer):
    """Ranks may have been restarted elsewhere: the newest state that any of them has is everyone's."""
    state = State(model, optimizer)
    if os.path.isfile(checkpoint_file):
        state.load(checkpoint_file)
    with tmp_process_group(backend="gloo") as pg:
        rank = dist.get_rank(group=pg)
        epochs = torch.zeros(dist.get_world_size(), dtype=torch.int32)
        epochs[rank] = state.epoch
        dist.all_reduce(epochs, op=dist.ReduceOp.SUM, group=pg)
        max_epoch, max_rank = epochs.max(dim=0)
        if max_epoch == -1:
            return state
        buffer = io.BytesIO()
        state.save(buffer)
        blob = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        dist.broadcast(blob, src=int(max_rank), group=pg)
        state.load(io.BytesIO(blob.numpy().tobytes()))
    return state


def save_checkpoint(state, is_best, filename):
    tmp = filename + ".tmp"
    torch.save(state.capture_snapshot(), tmp)
    os.rename(tmp, filename)
    if is_best:
        print(f"=> best model found at epoch {state.epoch}")


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0.0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean().item() * 100.0


def train(loader, model, criterion, optimizer, epoch):
    losses, top1 = AverageMeter(), AverageMeter()
    model.train()
    for images, target in loader:
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(accuracy(output, target), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {dist.get_rank()} epoch {epoch} loss {losses.avg:.6f} acc {top1.avg:.2f}")


def validate(loader, model, criterion):
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(accuracy(output, target), images.size(0))
    print(f" * rank {dist.get_rank()} val loss {losses.avg:.6f} Acc@1 {top1.avg:.3f}")
    return top1.avg


@record
def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    dist.init_process_group(backend=args.dist_backend, init_method="env://", timeout=timedelta(seconds=60))
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    model = DistributedDataParallel(net)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    train_data = FakeImages(128, 1)
    sampler = ElasticDistributedSampler(train_data)
    train_loader = DataLoader(train_data, args.batch_size, num_workers=args.workers, sampler=sampler)
    val_loader = DataLoader(FakeImages(32, 2), args.batch_size)
    state = load_checkpoint(args.checkpoint_file, model, optimizer)
    for epoch in range(state.epoch + 1, args.epochs):
        state.epoch = epoch
        sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch)
        acc1 = validate(val_loader, model, criterion)
        is_best = acc1 > state.best_acc1
        state.best_acc1 = max(acc1, state.best_acc1)
        if int(os.environ["LOCAL_RANK"]) == 0:
            save_checkpoint(state, is_best, args.checkpoint_file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
