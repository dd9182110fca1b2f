"""Finds out what the word under the cursor is: a command, an option, or a value, and of which kind."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

Node = dict[str, Any]  # of commands.json: help, options, arguments, commands, stops
TABLE = os.path.join(os.path.dirname(__file__), "commands.json")


class Position(NamedTuple):
    """Where the cursor is. value: the option or argument that the word is a value of; None for a command or option.

    given: the values so far, by the option's or argument's name. ended: after --, no word is an option. foreign: the
    word belongs to the user's script.
    """

    node: Node
    value: Node | None
    given: dict[str, str]
    ended: bool = False
    foreign: bool = False


def read_table() -> Node:
    """Return the commands of ddptrain: `make schema` writes them. Raises OSError."""
    with open(TABLE, encoding="utf-8") as file:
        table: Node = json.load(file)
    return table


def locate(root: Node, words: list[str]) -> Position:
    """Return the position after the complete `words`, which do not include `ddptrain` itself."""
    node, given, ended, count = root, dict[str, str](), False, 0
    pending: Node | None = None
    left = 0  # values that the pending option still takes
    for word in words:
        arguments = node["arguments"]
        if pending is not None and left:
            given[pending["name"]] = word
            left -= 1
        elif word == "--" and not ended:
            ended = True
        elif word.startswith("-") and len(word) > 1 and not ended:
            name, has_value, value = word.partition("=")
            pending = node["options"].get(name)
            left = pending["values"] if pending else 0
            if pending and has_value and left:
                given[pending["name"]] = value
                left -= 1
        elif word in node["commands"] and not ended:
            node, count = node["commands"][word], 0
        else:
            if count < len(arguments):
                given.setdefault(arguments[count]["name"], word)
            count += 1
            if node["stops"]:
                return Position(node, None, given, ended=True, foreign=True)
    if pending is not None and left:
        return Position(node, pending, given)
    return Position(node, _argument(node["arguments"], count), given, ended)


def _argument(arguments: list[Node], count: int) -> Node | None:
    """The argument number `count`; the last one may take any number of words."""
    if count < len(arguments):
        return arguments[count]
    return arguments[-1] if arguments and arguments[-1]["values"] < 0 else None
