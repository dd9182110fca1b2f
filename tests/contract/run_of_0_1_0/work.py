import torch


def train(ctx, steps=6, fail_at=()):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    resumed = ctx.resume(model=model)
    for step in range(1 if resumed is None else resumed.step + 1, steps + 1):
        loss = 1.0 / step
        ctx.log({"train/loss": loss}, step=step)
        ctx.checkpoint(model=model, step=step, metrics={"val/loss": loss + 0.5})
        print("step", step, flush=True)
        if step in fail_at:
            raise ValueError(f"step {step} fails")
