"""Keeps secrets out of what is written down: run directories, logs and error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LEFT_OUT = "<left out>"

_SECRET_NAME = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL", re.IGNORECASE)
_SECRET_OPTION = re.compile(
    r"(.*[_-])?((api|access)?key|token|secret|password|passwd|passphrase|credentials?|authorization|cookie"
    r"|connection_string)",
    re.IGNORECASE | re.DOTALL,
)
_USER_INFO = re.compile(r"(?<=://)[^/?#\s]+(?=@)")
_QUERY_PART = re.compile(r"([?&])([^=&#?\s]*)=([^&#\s]+)")
_QUERY_SECRET = re.compile(r"key|token|secret|password|credential|signature", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of that name is likely to hold a secret."""
    return _SECRET_NAME.search(name) is not None


def is_secret_option(name: str) -> bool:
    """Whether a parameter of that name, as the `key` and `secret` of S3, holds a secret if it is text."""
    return _SECRET_OPTION.fullmatch(name) is not None


def holds_secret(path: Sequence[str | int]) -> bool:
    """Whether a configuration's value at that key, as ("env", "WANDB_API_KEY"), is probably secret."""
    names = [part for part in path if isinstance(part, str)]
    if path[:1] == ("env",):
        return any(is_secret_name(name) for name in names)
    return any(is_secret_option(name) for name in names)


def hide_options(value: Any, *, in_secret: bool = False) -> Any:
    """The options of somebody's class, without texts and numbers at or below a name that says they are secret."""
    if isinstance(value, Mapping):
        return {
            name: hide_options(below, in_secret=in_secret or is_secret_option(str(name)))
            for name, below in value.items()
        }
    if isinstance(value, list | tuple):
        return [hide_options(below, in_secret=in_secret) for below in value]
    if in_secret and value not in ("", None) and not isinstance(value, bool):
        return LEFT_OUT
    return hide_credentials(value) if isinstance(value, str) else value


def secrets_in(value: Any, hidden: Any) -> Iterator[str]:
    """The texts of `value` that hide_options() has changed to make `hidden`."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from secrets_in(below, hidden[name])
    elif isinstance(value, list | tuple):
        for below, shown in zip(value, hidden, strict=True):
            yield from secrets_in(below, shown)
    elif value != hidden:
        yield str(value)


def hide_credentials(text: str) -> str:
    """The text without what stands before the @ of a URL, and without keys and tokens in a URL's query."""
    if "://" not in text:
        return text
    return _QUERY_PART.sub(_hide_in_query, _USER_INFO.sub(LEFT_OUT, text))


def _hide_in_query(part: re.Match[str]) -> str:
    return f"{part[1]}{part[2]}={LEFT_OUT}" if _QUERY_SECRET.search(part[2]) else part[0]
