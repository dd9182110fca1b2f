"""Removes secrets from data that are written or sent: run directories, messages, tasks, trackers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ddptrain.secret_rules import KNOWN_FORMATS, is_secret_in_query, is_secret_name

LEFT_OUT = "<left out>"

_ADDRESS = re.compile(r"(?<=://)(?:(?!://)\S)+")
_QUERY_PART = re.compile(r"([?&;#])([^=&;#?\s]+)=(?!<left out>)([^&;#\s\"']+)")
# Names have a longest length: without it, a text such as "a.a.a.a=" takes a time that grows with its length squared.
_ASSIGNED = re.compile(r"(?<![\w-])([A-Za-z_][\w.-]{0,200})(\s?=\s?)(?!=|<left out>)(\"[^\"]*\"|'[^']*'|[^\s;&,'\"]+)")
_IN_JSON = re.compile(r"([\"'])([\w.-]+)\1(\s*:\s*)(\"[^\"]*\"|'[^']*'|[0-9]+)")
_OPTION = re.compile(r"(?<![\w-])(--?[A-Za-z][\w.-]{0,200})([\s,\"']+)(?!<left out>)([^\s,\"'-][^\s,\"']*)")
_SHORTEST_SECRET = 4  # shorter numbers are not secrets; shorter texts occur within other text


def holds_secret(path: Sequence[str | int]) -> bool:
    """Return whether the value at a key of a configuration, as ("env", "WANDB_API_KEY"), is probably secret."""
    return any(is_secret_name(part) for part in path if isinstance(part, str))


def hide_secrets(value: Any, *, in_secret: bool = False) -> Any:
    """Return the data without the texts and numbers at or below a secret name, and without secrets inside texts.

    A list of texts is handled as the arguments of a program: `--password X`, `--token=X`.
    """
    if isinstance(value, Mapping):
        named_secret = is_secret_name(str(value.get("name", "")))  # {name: DB_PASSWORD, value: X}, as in Kubernetes
        return {
            name: hide_secrets(
                below, in_secret=in_secret or is_secret_name(str(name)) or (named_secret and name == "value")
            )
            for name, below in value.items()
        }
    if isinstance(value, list | tuple):
        if not in_secret and all(isinstance(below, str) for below in value):
            return hide_arguments(value)
        return [hide_secrets(below, in_secret=in_secret) for below in value]
    if isinstance(value, str):
        return LEFT_OUT if in_secret and value else hide_credentials(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return LEFT_OUT if in_secret and is_number and len(str(value)) >= _SHORTEST_SECRET else value


def hide_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a program without the values of options with secret names."""
    kept: list[str] = []
    follows_secret = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if follows_secret and not argument.startswith("--"):
            kept.append(LEFT_OUT)
            follows_secret = False
            continue
        is_secret = not any(char.isspace() for char in name) and "://" not in name and is_secret_name(name)
        follows_secret = is_secret and not equals and argument.startswith("-")
        kept.append(f"{name}={LEFT_OUT}" if is_secret and equals else hide_credentials(argument))
    return kept


def secrets_in(value: Any, hidden: Any) -> Iterator[str]:
    """Yield the texts of `value` that hide_secrets() changed in `hidden`."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from secrets_in(below, hidden[name])
    elif isinstance(value, list | tuple):
        for below, shown in zip(value, hidden, strict=True):
            yield from secrets_in(below, shown)
    elif value != hidden:
        yield str(value)


def known_secrets(*values: Any) -> list[str]:
    """Return the secrets in the data that are long enough to search in other texts, the longest first."""
    secrets = {text for value in values for text in secrets_in(value, hide_secrets(value))}
    return sorted((text for text in secrets if len(text) >= _SHORTEST_SECRET), key=len, reverse=True)


def hide_known(value: Any, secrets: Iterable[str]) -> Any:
    """Return the data with LEFT_OUT in place of each of these texts."""
    if isinstance(value, Mapping):
        return {name: hide_known(below, secrets) for name, below in value.items()}
    if isinstance(value, list | tuple):
        kept = [hide_known(below, secrets) for below in value]
        return kept if isinstance(value, list) else tuple(kept)
    for secret in secrets if isinstance(value, str) else ():
        value = value.replace(secret, LEFT_OUT)
    return value


def hide_credentials(text: str) -> str:
    """Return the text without secrets in URLs, values assigned to secret names, and texts of known secret formats."""
    if "://" in text:
        text = _QUERY_PART.sub(_hide_in_query, _ADDRESS.sub(_hide_user_info, text))
    if "=" in text:
        text = _ASSIGNED.sub(_hide_assigned, text)
    if ":" in text:
        text = _IN_JSON.sub(_hide_in_json, text)
    if "-" in text:
        text = _OPTION.sub(_hide_assigned, text)
    return KNOWN_FORMATS.sub(LEFT_OUT, text)


def _hide_user_info(address: re.Match[str]) -> str:
    """Return the text after "://" without user and password; the password may contain "/", "?" and "@" by mistake."""
    rest = address[0]
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    user_info, at, _ = authority.rpartition("@")
    _, colon, password = (user_info if at else authority).partition(":")
    if at and not colon:
        return LEFT_OUT + rest[len(user_info) :]
    if not colon or (not at and (not password or password.isdigit() or authority.startswith("["))):
        return rest  # no user: a port, or nothing, follows the host
    end = re.split(r"[?#]", rest, maxsplit=1)[0].rfind("@")
    end = rest.rfind("@") if end < 0 else end
    return rest if end < 0 else LEFT_OUT + rest[end:]


def _hide_in_query(part: re.Match[str]) -> str:
    return f"{part[1]}{part[2]}={LEFT_OUT}" if is_secret_in_query(part[2]) else part[0]


def _hide_assigned(part: re.Match[str]) -> str:
    # In messages, `key=` alone is often the name of an object in a store.
    return f"{part[1]}{part[2]}{LEFT_OUT}" if part[1] != "key" and is_secret_name(part[1]) else part[0]


def _hide_in_json(part: re.Match[str]) -> str:
    return f'{part[1]}{part[2]}{part[1]}{part[3]}"{LEFT_OUT}"' if is_secret_name(part[2]) else part[0]
