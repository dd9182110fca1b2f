"""Options that stand for fields of the configuration, checked as the file is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

Loaded = TypeVar("Loaded")


def checked(load: Callable[[Sequence[str]], Loaded], overrides: Sequence[str], options: Mapping[str, str]) -> Loaded:
    """What `load` makes of `--set` texts and of `options` (`--set` text -> the option as it was typed).

    Raises: ConfigError, whose problems name the option that was typed.
    """
    from ddptrain.errors import ConfigError

    try:
        return load([*overrides, *options])
    except ConfigError as error:
        typed = {f"--set {text}": option for text, option in options.items()}
        problems = [replace(problem, where=typed.get(problem.where, problem.where)) for problem in error.problems]
        raise ConfigError(problems) from None
