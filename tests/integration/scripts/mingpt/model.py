"""A GPT in miniature: one block of causal self-attention over characters."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    vocab_size: int = 0
    block_size: int = 16
    n_embd: int = 16
    n_head: int = 2


@dataclass
class OptimizerConfig:
    learning_rate: float = 3e-3
    weight_decay: float = 0.1


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Parameter(torch.zeros(1, config.block_size, config.n_embd))
        self.attention = nn.MultiheadAttention(config.n_embd, config.n_head, batch_first=True)
        self.norm = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd), nn.GELU(), nn.Linear(4 * config.n_embd, config.n_embd)
        )
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        steps = idx.size(1)
        x = self.tokens(idx) * math.sqrt(self.config.n_embd) + self.positions[:, :steps]
        mask = torch.triu(torch.ones(steps, steps, dtype=torch.bool), diagonal=1)
        attended, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
        x = self.norm(x + attended)
        logits = self.head(x + self.mlp(x))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


def create_optimizer(model, config):
    return torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
