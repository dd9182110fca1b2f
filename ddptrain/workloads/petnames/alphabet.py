"""The 31 symbols that a pet name is written in, and how a name becomes numbers."""

from __future__ import annotations

import string
from collections.abc import Sequence

BLANK = "*"  # before the first character, and padding; never a target
STOP = "+"  # after the last character
SYMBOLS = BLANK + STOP + string.ascii_lowercase + "-. "
BLANK_ID = SYMBOLS.index(BLANK)
STOP_ID = SYMBOLS.index(STOP)

_IDS = {symbol: number for number, symbol in enumerate(SYMBOLS)}
_NAME_CHARACTERS = frozenset(SYMBOLS) - {BLANK, STOP}


def normalise(text: str) -> str:
    """The form in which names are trained on and compared: lower case, single spaces, none at the ends."""
    return " ".join(text.lower().split())


def foreign_characters(text: str) -> str:
    """The characters of `text` that no name may hold, each once, in order of appearance."""
    return "".join(dict.fromkeys(c for c in text if c not in _NAME_CHARACTERS))


def encode(text: str) -> list[int]:
    """The numbers (0 to 30) of the symbols of `text`, which must all be in the alphabet."""
    return [_IDS[symbol] for symbol in text]


def decode(numbers: Sequence[int]) -> str:
    """The inverse of `encode`."""
    return "".join(SYMBOLS[number] for number in numbers)


def display(name: str) -> str:
    """A name as people write it: "mr. whiskers" becomes "Mr. Whiskers"."""
    return name.title()
