"""The least that trains: `ddptrain train examples/minimal.yaml` calls train() on every rank."""

import torch
from torch.utils.data import TensorDataset

import ddptrain


def train(ctx: ddptrain.RankContext, epochs: int = 3, lr: float = 0.05) -> dict[str, float]:
    torch.manual_seed(0)
    model = ctx.prepare(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    x = torch.rand(1024, 4)
    loader = ctx.loader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)

    resumed = ctx.resume(model=model, optimizer=optimizer)
    step, loss = resumed.step if resumed else 0, 0.0
    for epoch in ctx.epochs(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            error = (model(inputs.to(ctx.device)) - targets.to(ctx.device)).pow(2).mean()
            error.backward()
            optimizer.step()
            step += 1
        loss = ctx.mean(error)
        ctx.log({"train/loss": loss}, step=step, epoch=epoch)
        ctx.checkpoint(model=model, optimizer=optimizer, step=step, epoch=epoch, metrics={"val/loss": loss})
    return {"loss": loss}
