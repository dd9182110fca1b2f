"""Finds the function that a workload is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def load_function(target: str) -> Callable[..., Any]:
    """The function behind "package.module:function", imported now.

    Raises:
        ImportError: the module can't be found; Python and sys.path are told.
        AttributeError: the module has no such function.
    """
    module_name, _, name = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        root = module_name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != root:
            raise
        raise ModuleNotFoundError(
            f"workload {target!r}: no module {error.name!r} for {sys.executable}, sys.path {sys.path}", name=error.name
        ) from None
    for part in name.split("."):
        if not hasattr(found, part):
            public = sorted(attr for attr, value in vars(found).items() if callable(value) and not attr.startswith("_"))
            raise AttributeError(
                f"workload {target!r}: {found!r} has no {part!r}; it has {', '.join(public) or 'nothing'}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"workload {target!r} is {found!r}, not a function")
    return found  # type: ignore[no-any-return]
