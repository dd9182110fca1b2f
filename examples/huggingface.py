"""Hugging Face's Trainer with a model of random weights, on every GPU: ddptrain train examples/huggingface.yaml.

It needs `pip install 'ddptrain[huggingface]'`, and no download: the text is made here, a byte is a token.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import ddptrain

TEXT = b"the quick brown fox jumps over the lazy dog. "
LENGTH = 32


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Every window of LENGTH bytes of the text."""

    def __init__(self, repeats: int) -> None:
        self._text = torch.tensor(list(TEXT * repeats))

    def __len__(self) -> int:
        return len(self._text) - LENGTH

    def __getitem__(self, start: int) -> dict[str, torch.Tensor]:
        window = self._text[start : start + LENGTH]
        return {"input_ids": window, "labels": window}


def train(
    ctx: ddptrain.RankContext, epochs: int = 3, batch_size: int = 8, width: int = 32, lr: float = 3e-3
) -> dict[str, Any]:
    """A causal language model that learns a sentence."""
    set_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=width, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    callback = ddptrain.HuggingFaceCallback(ctx)  # saves, logs, reports progress, ends when the run is preempted
    with tempfile.TemporaryDirectory() as unused:
        arguments = TrainingArguments(
            output_dir=unused,
            num_train_epochs=epochs,
            per_device_train_batch_size=batch_size,
            learning_rate=lr,
            eval_strategy="epoch",
            logging_steps=5,
            save_strategy="no",  # ctx.checkpoint saves: see `checkpoint:` in the configuration
            use_cpu=ctx.device.type == "cpu",
            disable_tqdm=True,
            report_to=[],
        )
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=arguments,
            train_dataset=Windows(10),
            eval_dataset=Windows(2),
            callbacks=[callback],
        )
        trainer.train(resume_from_checkpoint=callback.resume_from())
        return trainer.evaluate()
