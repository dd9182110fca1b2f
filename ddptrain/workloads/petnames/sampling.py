"""Samples many names at a time from a character model. Names that have ended are no longer computed."""

from __future__ import annotations

import torch
from torch import Tensor

from ddptrain.workloads.petnames.alphabet import BLANK_ID, STOP_ID, decode, encode
from ddptrain.workloads.petnames.model import CharacterModel, State

MAX_LENGTH = 64  # a longer name counts as not ended


@torch.inference_mode()
def sample_names(
    model: CharacterModel,
    count: int,
    start: str,
    temperature: float,
    draw: torch.Generator,
    longest: int = MAX_LENGTH,
) -> list[str | None]:
    """Sample `count` names that begin with `start`, as the model writes them.

    None stands for a name that did not end within `longest` characters.
    """
    window = model.config.window if model.config.context == "window" else 1
    begun = torch.tensor([BLANK_ID] * window + encode(start))
    end = max(len(begun) + 1, window + longest)
    texts = torch.full((count, end), BLANK_ID)
    texts[:, : len(begun)] = begun
    unfinished = torch.arange(count)
    state: State | None = None  # with full context it is carried from symbol to symbol; a window is read as a whole
    if model.config.context == "full":
        for symbol in begun[:-1]:
            _, state = model.step(symbol.expand(count), state)
    for position in range(len(begun), end):
        if model.config.context == "full":
            scores, state = model.step(texts[unfinished, position - 1], state)
        else:
            scores = model(texts[unfinished, position - window : position])[:, -1]
        symbols = _draw(scores, temperature, draw, may_stop=position > window)
        texts[unfinished, position] = symbols
        going = symbols != STOP_ID
        unfinished = unfinished[going]
        if len(unfinished) == 0:
            break
        if state is not None:
            state = (state[0][:, going], state[1][:, going])
    return [_text(row) for row in texts[:, window:].tolist()]


def _draw(logits: Tensor, temperature: float, draw: torch.Generator, *, may_stop: bool) -> Tensor:
    """Draw the next symbol of each name, [n]: never a blank, and no stop in an empty name."""
    scores = logits.double()
    scores[:, BLANK_ID] = -torch.inf
    if not may_stop:
        scores[:, STOP_ID] = -torch.inf
    # Scores are relative to the largest: a very small temperature then selects the best symbol and does not overflow.
    scores = (scores - scores.amax(1, keepdim=True)) / temperature
    ends = scores.softmax(1).cumsum(1)
    ends /= ends[:, -1:].clone()
    drawn = torch.rand(len(ends), 1, generator=draw, dtype=torch.float64)
    return torch.searchsorted(ends, drawn, right=True).squeeze(1)


def _text(symbols: list[int]) -> str | None:
    return decode(symbols[: symbols.index(STOP_ID)]) if STOP_ID in symbols else None
