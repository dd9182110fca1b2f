"""A Hugging Face model from random weights, on every GPU: ddptrain train examples/huggingface.yaml.

It needs `pip install transformers`, and no download: the text is made here, a byte is a token.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from ddptrain import RankContext

TEXT = b"the quick brown fox jumps over the lazy dog. "
LENGTH = 32


def train(
    ctx: RankContext, steps: int = 30, batch_size: int = 8, width: int = 32, lr: float = 3e-3
) -> dict[str, float]:
    """A causal language model that learns a sentence."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=width, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = DistributedDataParallel(GPT2LMHeadModel(config).to(ctx.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    resumed = ctx.resume(model=model, optimizer=optimizer)
    text = torch.tensor(list(TEXT * 20))
    generator = torch.Generator().manual_seed(ctx.rank)  # each rank reads other places
    loss = torch.zeros(())
    for step in range(resumed.step + 1 if resumed else 1, steps + 1):
        starts = torch.randint(len(text) - LENGTH, (batch_size,), generator=generator)
        tokens = torch.stack([text[start : start + LENGTH] for start in starts.tolist()]).to(ctx.device)
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        ctx.progress(step, steps, unit="steps")
        ctx.log({"loss": loss.detach()}, step=step)
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    mean /= ctx.world_size
    ctx.checkpoint(model=model, optimizer=optimizer, step=steps, metrics={"loss": mean}, last=True)
    return {"loss": float(mean)}
