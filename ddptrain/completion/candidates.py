"""The words that may stand under the cursor, with a help text for the shells that show one."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from ddptrain.completion import names
from ddptrain.completion.config_fields import Field, fields_of

Candidates = dict[str, str]  # word -> help
_CODES = ("1", "2", "3", "4", "5", "6", "7", "8", "9", "75", "130", "143")
Node = dict[str, Any]  # of commands.json: help, options, arguments, commands, stops
TABLE = os.path.join(os.path.dirname(__file__), "commands.json")


def candidates(table: Node, words: list[str], word: str) -> Candidates:
    """Return what may stand in place of `word`; `words` are those before it, without the program's name.

    Nothing means that the shell completes file names.
    """
    position = locate(table, words)
    if position.foreign:
        return {}
    name, has_value, value = word.partition("=")
    is_option = word.startswith("-") and not position.ended
    if is_option and has_value and (option := position.node["options"].get(name)):
        values = _values(option, position.given, value)
        return {f"{name}={each}": text for each, text in values.items()}
    if is_option and not (position.value and position.value["is_option"]):
        values = {each: option["help"] for each, option in position.node["options"].items() if not option["hidden"]}
    elif position.value is not None:
        values = _values(position.value, position.given, word)
    else:
        values = {each: node["help"] for each, node in position.node["commands"].items()}
    return {each: text for each, text in values.items() if each.startswith(word)}


def _values(parameter: Node, given: dict[str, str], word: str) -> Candidates:
    """Return the values of an option or argument that begin with `word`."""
    values: Candidates = dict.fromkeys(parameter["choices"], "")
    for kind in parameter["kinds"]:
        values |= _named(kind, given, word)
    return {each: text for each, text in values.items() if each.startswith(word)}


def _named(kind: str, given: dict[str, str], word: str) -> Candidates:
    runs_dir, models_dir = given.get("runs_dir", "runs"), given.get("models_dir") or names.models_dir()
    match kind:
        case "run":
            return dict.fromkeys(["latest", *names.run_ids(runs_dir)], "")
        case "exit code":
            return dict.fromkeys(_CODES, "exit code")
        case "cluster":
            return dict.fromkeys(names.cluster_names(), "")
        case "model":
            return dict.fromkeys(names.model_names(models_dir), "")
        case "version":
            model, at, _ = word.partition("@")
            models = names.model_names(models_dir)
            return dict.fromkeys(names.model_references(models_dir, model) if at and model in models else models, "")
        case "configuration":
            paths = {} if "/" in word else names.configurations()
            return {each: path if path.startswith("./") else "example" for each, path in paths.items()}
        case "field":
            return changes(fields_of(given.get("config", "")), word)
        case _:
            return {}


def changes(fields: dict[str, Field], word: str) -> Candidates:
    """Return the words KEY=VALUE that begin with `word`, one level of sections at a time."""
    key, has_value, _ = word.partition("=")
    if has_value:
        field = fields.get(key, Field())
        return {f"{key}={value}": "" for value in (field.values or ([field.default] if field.default else ()))}
    heads: Candidates = {}
    for name, field in fields.items():
        if name.startswith(word):
            head, dot, _ = name[len(word) :].partition(".")
            heads[f"{word}{head}{dot or '='}"] = "" if dot else field.help
    if len(heads) != 1:
        return heads
    (head,) = heads
    if head.endswith("."):
        return changes(fields, head)
    values = fields[head[:-1]].values
    return {f"{head}{value}": "" for value in values} if values else heads


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
    """Return the argument number `count`; the last one may take any number of words."""
    if count < len(arguments):
        return arguments[count]
    return arguments[-1] if arguments and arguments[-1]["values"] < 0 else None
