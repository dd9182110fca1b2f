"""The least that trains: `ddptrain train examples/minimal.yaml` calls train() on every rank."""

import torch
from torch.nn.parallel import DistributedDataParallel

import ddptrain


def train(ctx: ddptrain.RankContext, epochs: int = 3, lr: float = 0.05) -> dict[str, float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1).to(ctx.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    inputs = torch.rand(256, 4, generator=torch.Generator().manual_seed(ctx.rank)).to(ctx.device)
    targets = inputs.sum(1, keepdim=True)

    resumed = ctx.resume(model=model, optimizer=optimizer)
    loss = torch.tensor(0.0)
    for epoch in range(resumed.step + 1 if resumed else 1, epochs + 1):
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(inputs) - targets).pow(2).mean()
            loss.backward()
            optimizer.step()
        ctx.log({"train/loss": loss}, step=epoch, epoch=epoch)
        ctx.checkpoint(model=model, optimizer=optimizer, step=epoch, epoch=epoch, metrics={"val/loss": loss})
    return {"loss": loss.item()}
