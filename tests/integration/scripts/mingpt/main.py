"""In the shape of minGPT-ddp's main.py: siblings are imported, settings come from a file beside, key=value changes."""

import json
import sys
from pathlib import Path

import torch
from char_dataset import CharDataset
from model import GPT, GPTConfig, OptimizerConfig, create_optimizer
from torch.distributed import destroy_process_group, init_process_group
from torch.utils.data import random_split
from trainer import Trainer, TrainerConfig


def main():
    settings = json.loads(Path(__file__).with_name("gpt2_train_cfg.json").read_text())
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        section, name = key.split(".")
        settings[section][name] = json.loads(value)
    init_process_group(backend="gloo")
    torch.manual_seed(settings["data"]["seed"])
    dataset = CharDataset(settings["data"]["text"] * 4, settings["gpt"]["block_size"])
    train_len = int(len(dataset) * 0.9)
    train_set, test_set = random_split(dataset, [train_len, len(dataset) - train_len])
    model = GPT(GPTConfig(vocab_size=dataset.vocab_size, **settings["gpt"]))
    optimizer = create_optimizer(model, OptimizerConfig(**settings["optimizer"]))
    Trainer(TrainerConfig(**settings["trainer"]), model, optimizer, train_set, test_set).train()
    destroy_process_group()


if __name__ == "__main__":
    main()
