"""The character model: an LSTM over the 31 symbols and a linear layer with a score for each next symbol."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from ddptrain.errors import UsageError
from ddptrain.workloads.petnames.names import SYMBOLS
from ddptrain.workloads.petnames.params import PetnamesParams

State = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture of a model. Each checkpoint contains it, so that the model can be built again."""

    context: str
    window: int
    input: str
    embedding_size: int
    hidden_size: int
    layers: int
    dropout: float
    output_dropout: float
    symbols: str = SYMBOLS

    @classmethod
    def of(cls, params: PetnamesParams) -> ModelConfig:
        """Return the architecture that the parameters select."""
        shape = {field.name for field in dataclasses.fields(cls)} - {"symbols"}
        return cls(**params.model_dump(include=shape))

    @classmethod
    def restored(cls, stored: Any) -> ModelConfig:
        """The architecture in a checkpoint. Raises UsageError if it is not one of a pet-name model over SYMBOLS."""
        try:
            config = cls(**stored)
            PetnamesParams.model_validate({name: value for name, value in config.plain().items() if name != "symbols"})
        except (TypeError, ValidationError) as error:
            first = error.errors()[0] if isinstance(error, ValidationError) else None
            why = f"{first['loc'][0]}: {first['msg']}" if first else error
            message = f"the checkpoint does not contain a pet-name model: {why}; was it made by this version?"
            raise UsageError(message) from None
        if config.symbols != SYMBOLS:
            raise UsageError(f"the checkpoint's model is over the symbols {config.symbols!r}, expected {SYMBOLS!r}")
        return config

    def plain(self) -> dict[str, str | int | float]:
        """Return the architecture as plain data, for a checkpoint."""
        return dataclasses.asdict(self)


class CharacterModel(nn.Module):
    """Predicts the next symbol: at each position of a whole name, or after a window."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        embedded = config.input == "embedding"
        self.embedding = nn.Embedding(len(SYMBOLS), config.embedding_size) if embedded else None
        self.lstm = nn.LSTM(
            config.embedding_size if embedded else len(SYMBOLS),
            config.hidden_size,
            num_layers=config.layers,
            batch_first=True,
            dropout=config.dropout if config.layers > 1 else 0.0,  # torch warns about dropout after the only layer
        )
        self.output_dropout = nn.Dropout(config.output_dropout)
        self.linear = nn.Linear(config.hidden_size, len(SYMBOLS))

    @classmethod
    def restored(cls, stored: Any) -> CharacterModel:
        """Return the model of the architecture in a checkpoint, without memory for weights: it may not be what it says.

        Raises UsageError as ModelConfig.restored does.
        """
        with torch.device("meta"):
            return cls(ModelConfig.restored(stored))

    def forward(self, symbols: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits [m, 31] of the m targets of a batch, in the order of NameDataset.batch.

        symbols [n, t] and lengths [n], on the CPU, the longest first: with full context there is a target after each
        symbol of a row, with a window after the last one.
        """
        rows = pack_padded_sequence(self._enter(symbols), lengths, batch_first=True)
        with torch.autocast("cpu", enabled=False):  # oneDNN's LSTM in half precision fails on many CPUs
            output, (state, _) = self.lstm(rows)
        hidden = output.data if self.config.context == "full" else state[-1]
        scores: Tensor = self.linear(self.output_dropout(hidden))
        return scores

    def step(self, symbols: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Read further symbols [n, t] of n texts; return the logits [n, 31] of the next symbol, and the new state."""
        hidden, state = self.lstm(self._enter(symbols), state)
        return self.linear(hidden[:, -1]), state

    def _enter(self, symbols: Tensor) -> Tensor:
        if self.embedding is not None:
            embedded: Tensor = self.embedding(symbols.int())
            return embedded
        return functional.one_hot(symbols.long(), len(SYMBOLS)).to(self.linear.weight.dtype)
