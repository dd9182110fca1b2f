"""Formats keys and values for error messages: short, without secrets and terminal escape sequences."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from ddptrain.redact import LEFT_OUT, hide_credentials, holds_secret

PathKey = tuple[str | int, ...]
KNOWN = "known are: "  # the start of a hint


def shorten(text: str, limit: int = 80) -> str:
    """Return at most `limit` characters of the text; control characters and broken Unicode are escaped."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in cut)


def listed(names: Sequence[str], most: int, limit: int = 40) -> str:
    """Return the first `most` names, each of at most `limit` characters, as "a, b and 3 more"."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(shorten(name, limit) for name in names[:most]) + more


def dotted(path: Sequence[str | int]) -> str:
    """Return the full key, as `params.layers[2]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + shorten(part, 60)
    return shorten(text, 200)


def describe_value(value: object, path: Sequence[str | int] = ()) -> str:
    """Describe the value as it is written in YAML; a secret is not shown."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "a mapping"
    if holds_secret(path):
        return LEFT_OUT
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'the text "{shorten(hide_credentials(value))}"'
    return shorten(str(value))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to `name`, or None."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name[:80].lower(), by_lower, n=1)
    return by_lower[matches[0]] if matches else None


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown name: the most similar known name, or else all of them."""
    match = nearest(name, known)
    return f"did you mean {match}?" if match else f"{KNOWN}{', '.join(sorted(known))}" if known else ""


def counted(number: int, noun: str) -> str:
    """Return the number with the noun, as "1 slot" or "2 slots"."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"
