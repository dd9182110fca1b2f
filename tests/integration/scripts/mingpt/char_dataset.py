"""Characters of a text, in blocks."""

import torch
from torch.utils.data import Dataset


class CharDataset(Dataset):
    def __init__(self, text, block_size):
        chars = sorted(set(text))
        self.stoi = {char: number for number, char in enumerate(chars)}
        self.vocab_size = len(chars)
        self.block_size = block_size
        self.data = [self.stoi[char] for char in text]

    def __len__(self):
        return len(self.data) - self.block_size

    def __getitem__(self, index):
        chunk = torch.tensor(self.data[index : index + self.block_size + 1])
        return chunk[:-1], chunk[1:]
