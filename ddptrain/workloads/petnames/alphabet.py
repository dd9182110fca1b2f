"""The alphabet of pet names: 31 symbols, and the conversion between names and numbers."""

from __future__ import annotations

import string
from collections.abc import Sequence

BLANK = "*"  # before the first character, and as padding; never a target
STOP = "+"  # after the last character
SYMBOLS = BLANK + STOP + string.ascii_lowercase + "-. "
BLANK_ID = SYMBOLS.index(BLANK)
STOP_ID = SYMBOLS.index(STOP)

_IDS = {symbol: number for number, symbol in enumerate(SYMBOLS)}
_NAME_CHARACTERS = frozenset(SYMBOLS) - {BLANK, STOP}


def normalise(text: str) -> str:
    """Return the form in which names are compared and trained on: lower case, single spaces, no spaces at the ends."""
    return " ".join(text.lower().split())


def foreign_characters(text: str) -> str:
    """Return the characters of `text` that are not in the alphabet, each once, in order of appearance."""
    return "".join(dict.fromkeys(c for c in text if c not in _NAME_CHARACTERS))


def encode(text: str) -> list[int]:
    """Return the numbers (0 to 30) of the symbols of `text`. Raises KeyError if a symbol is not in the alphabet."""
    return [_IDS[symbol] for symbol in text]


def decode(numbers: Sequence[int]) -> str:
    """Return the inverse of `encode`."""
    return "".join(SYMBOLS[number] for number in numbers)


def display(name: str) -> str:
    """Return the name with capital letters, as users see it: "mr. whiskers" becomes "Mr. Whiskers"."""
    return name.title()
