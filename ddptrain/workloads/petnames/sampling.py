"""Samples many names at a time from a character model.

Names with the same beginning share work: the LSTM runs once per distinct beginning, not once per name. With full
context the state is carried from character to character. A window moves, so each window is read from its start, also
once per distinct beginning. Names that have ended are no longer computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddptrain.workloads.petnames.alphabet import BLANK_ID, STOP_ID, SYMBOLS, decode, encode
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
    is_windowed = model.config.context == "window"
    reader: _WindowReader | _FullReader = _WindowReader(model, count) if is_windowed else _FullReader(model, count)
    first = torch.tensor([BLANK_ID, *encode(start)])
    for symbol in first:
        logits, node = reader.read(symbol.expand(count))
    names = first[1:].expand(count, len(start)).clone()
    names = torch.cat([names, torch.full((count, max(1, longest - len(start))), BLANK_ID)], dim=1)
    unfinished = torch.arange(count)
    for position in range(len(start), names.shape[1]):
        symbols = _draw(logits, node, temperature, draw, may_stop=position > 0)
        names[unfinished, position] = symbols
        going = symbols != STOP_ID
        unfinished, symbols = unfinished[going], symbols[going]
        if len(unfinished) == 0:
            break
        reader.keep(going)
        logits, node = reader.read(symbols)
    return [_text(row) for row in names.tolist()]


class _FullReader:
    """Reads many names in parallel, one symbol of each at a time: carries the state of the LSTM from symbol to symbol.

    `read` takes the next symbol of each name, [n], and returns logits [distinct, 31] and, per name, its row in them.
    `keep` drops the names for which `going` is false.
    """

    def __init__(self, model: CharacterModel, count: int) -> None:
        self._model = model
        self._state: State | None = None
        self._node = torch.zeros(count, dtype=torch.int64)

    def read(self, symbols: Tensor) -> tuple[Tensor, Tensor]:
        logits, self._state, self._node = _branch(self._model, self._state, self._node, symbols)
        return logits, self._node

    def keep(self, going: Tensor) -> None:
        self._node = self._node[going]


class _WindowReader:
    """As _FullReader, but reads the last symbols of each name again for every prediction."""

    def __init__(self, model: CharacterModel, count: int) -> None:
        self._model = model
        self._windows = torch.full((count, model.config.window), BLANK_ID, dtype=torch.int64)

    def read(self, symbols: Tensor) -> tuple[Tensor, Tensor]:
        self._windows = torch.cat([self._windows[:, 1:], symbols[:, None]], dim=1)
        state: State | None = None
        node = torch.zeros(len(symbols), dtype=torch.int64)
        for column in self._windows.unbind(1):
            logits, state, node = _branch(self._model, state, node, column)
        return logits, node

    def keep(self, going: Tensor) -> None:
        self._windows = self._windows[going]


def _branch(model: CharacterModel, state: State | None, node: Tensor, symbols: Tensor) -> tuple[Tensor, State, Tensor]:
    """Extend the distinct beginnings `node`, [n], by one symbol each.

    Returns the logits and states of the distinct longer beginnings, and the index of each name's beginning in them.
    """
    distinct, longer = torch.unique(node * len(SYMBOLS) + symbols, return_inverse=True)
    parent = distinct // len(SYMBOLS)
    if state is not None:
        state = (state[0][:, parent], state[1][:, parent])
    logits, state = model.step(distinct % len(SYMBOLS), state)
    return logits, state, longer


def _draw(logits: Tensor, node: Tensor, temperature: float, draw: torch.Generator, *, may_stop: bool) -> Tensor:
    """Draw the next symbol of each name, [n]: never a blank, and no stop in an empty name."""
    scores = logits.double()
    scores[:, BLANK_ID] = -torch.inf
    if not may_stop:
        scores[:, STOP_ID] = -torch.inf
    # Scores are relative to the largest: a very small temperature then selects the best symbol and does not overflow.
    scores = (scores - scores.amax(1, keepdim=True)) / temperature
    ends = scores.softmax(1).cumsum(1)
    ends /= ends[:, -1:].clone()
    drawn = torch.rand(len(node), 1, generator=draw, dtype=torch.float64)
    return torch.searchsorted(ends[node], drawn, right=True).squeeze(1)


def _text(symbols: list[int]) -> str | None:
    return decode(symbols[: symbols.index(STOP_ID)]) if STOP_ID in symbols else None
