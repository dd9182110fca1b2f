"""How a model is named on the command line: `petnames@champion`, `petnames@3`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddptrain.config.wording import shorten
from ddptrain.errors import UsageError

CHAMPION = "champion"
PREVIOUS = "previous"
_MODEL_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_ALIAS = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class ModelReference:
    """One version of a model, by its number or by an alias."""

    model: str
    version: int | None = None
    alias: str = ""

    def __str__(self) -> str:
        return f"{self.model}@{self.alias or self.version}"


def is_model_reference(text: str) -> bool:
    """Return whether a command's argument names a model. Run ids have no @; paths and URLs have a slash."""
    return "@" in text and "/" not in text


def parse_reference(text: str) -> ModelReference:
    """Read MODEL@ALIAS or MODEL@NUMBER; MODEL alone is its champion. Raises UsageError."""
    model, _, which = text.partition("@")
    check_model_name(model)
    if not which and "@" not in text:
        return ModelReference(model, alias=CHAMPION)
    if _VERSION.fullmatch(which):
        return ModelReference(model, version=int(which))
    check_alias(which)
    return ModelReference(model, alias=which)


def is_model_name(name: str) -> bool:
    """Return whether a model may have this name. It becomes the name of a folder, so it must not be a path."""
    return _MODEL_NAME.fullmatch(name) is not None and ".." not in name


def check_model_name(name: str) -> None:
    """Raise UsageError for an invalid model name."""
    if not is_model_name(name):
        raise UsageError(
            f'"{shorten(name)}" is not a model name: use up to 64 lower-case letters, digits, dots, dashes and '
            "underscores, without two dots in a row, beginning with a letter or digit"
        )


def check_alias(alias: str) -> None:
    """Raise UsageError for an alias that is malformed, or could be taken for a version number."""
    if not _ALIAS.fullmatch(alias):
        raise UsageError(
            f'"{shorten(alias)}" is neither a version number nor an alias: an alias has up to 32 lower-case letters, '
            "digits, dashes and underscores, and begins with a letter"
        )
