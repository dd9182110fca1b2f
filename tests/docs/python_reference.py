"""Writes docs/reference/python.md from the signatures and docstrings of the Python API."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ddptrain
from ddptrain import errors
from ddptrain.rank.context import RankContext
from ddptrain.rank.evaluation import SavedCheckpoint
from ddptrain.rank.huggingface import HuggingFaceCallback

TARGET = Path(__file__).parents[2] / "docs" / "reference" / "python.md"
_HEAD = """# Python

Everything here is imported from `ddptrain`: `ddptrain.launch`, `ddptrain.Run`, `ddptrain.context()`, ...
[Which methods all ranks must call](../start/function.md#which-methods-all-ranks-must-call).
"""
_LINE = 100


def python_page() -> str:
    """Return the page."""
    parts = [_HEAD, "## In a rank\n"]
    in_a_rank: list[Any] = [RankContext, ddptrain.context, SavedCheckpoint, HuggingFaceCallback]
    in_a_program: list[Any] = [ddptrain.launch, ddptrain.Run, ddptrain.load_model]
    parts += [line for item in in_a_rank for line in _described(item)]
    parts.append("## In your program\n")
    parts += [line for item in in_a_program for line in _described(item)]
    parts.append("## Errors\n")
    for name, value in vars(errors).items():
        if inspect.isclass(value) and value.__module__ == errors.__name__ and hasattr(ddptrain, name):
            parts += [f"### `{name}`\n", _text(value)]
    return "\n".join(parts)


def _described(item: Any) -> Iterator[str]:
    """Yield a function, or a class with its public members."""
    yield f"### `{item.__name__}`\n"
    if not inspect.isclass(item):
        yield _signature(item.__name__, item)
    yield _text(item)
    for name, member in _members(item) if inspect.isclass(item) else ():
        yield f"#### `{name}`\n"
        if not isinstance(member, property):
            yield _signature(name, member)
        yield _text(member)


def _members(owner: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties in the order of the source, inherited ones last."""
    seen: set[str] = set()
    for base in owner.__mro__:
        if base.__module__.partition(".")[0] != ddptrain.__name__:
            continue
        for name, member in vars(base).items():
            is_public = not name.startswith(("_", "on_")) and name not in (*seen, "close")
            if is_public and (callable(member) or isinstance(member, property | classmethod | staticmethod)):
                seen.add(name)
                yield name, member


def _signature(name: str, item: Any) -> str:
    """Return the code block of a function: in one line, or with a line for each parameter."""
    signature = inspect.signature(getattr(item, "__func__", item))
    words: list[str] = []
    for each in signature.parameters.values():
        if each.name in ("self", "cls"):
            continue
        is_bare = each.kind is each.KEYWORD_ONLY and not any(word.startswith("*") for word in words)
        words += [*(["*"] if is_bare else []), _parameter(each)]
    result = "" if signature.return_annotation is signature.empty else f" -> {signature.return_annotation}"
    text = f"{name}({', '.join(words)}){result}"
    if len(text) > _LINE:
        text = f"{name}(\n    {f',{chr(10)}    '.join(words)},\n){result}"
    return f"```python\n{text}\n```\n"


def _parameter(each: inspect.Parameter) -> str:
    stars = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
    kind = "" if each.annotation is each.empty else f": {each.annotation}"
    default = "" if each.default is each.empty else f" = {each.default!r}"
    return f"{stars}{each.name}{kind}{default}"


def _text(item: Any) -> str:
    """Return the docstring; what follows `Raises:` and the like is a list."""
    lines: list[str] = []
    is_list = False
    for line in (inspect.getdoc(item) or "").replace("<", "\\<").splitlines():
        if line.endswith(":") and not line.startswith(" ") and line[:-1] in ("Raises", "Args", "Returns", "Example"):
            is_list = True
            lines += [line, ""]
        elif is_list and line.startswith("    ") and not line.startswith("     "):
            lines.append(f"- {line.strip()}")
        else:
            is_list = is_list and line.startswith(" ")
            lines.append(line.strip() if is_list else line)
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the page."""
    TARGET.write_text(python_page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
