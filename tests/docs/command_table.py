"""Writes ddptrain/completion/commands.json, which shell completion reads instead of importing all commands."""

from __future__ import annotations

import enum
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

from typer.main import get_command

from ddptrain.cli.main import app
from ddptrain.completion.candidates import TABLE

# Metavar (or name, where there is none) -> what exists on this machine and may stand there.
KINDS = {
    "RUN": ["run"],
    "RUN|auto": ["run"],
    "RUN|MODEL": ["run", "version"],
    "RUN|SWEEP|MODEL": ["run", "version"],
    "VERSION|RUN": ["run"],
    "CODE|RUN": ["exit code", "run"],
    "MODEL": ["model"],
    "MODEL[@ALIAS|@VERSION]": ["version"],
    "MODEL@ALIAS": ["version"],
    "NAME|ADDRESS|FILE": ["cluster"],
    "config": ["configuration"],
    "CONFIG": ["configuration"],
    "KEY=VALUE": ["field"],
}
EXTRA = {"RUN|auto": ["auto"]}


def command_table() -> dict[str, Any]:
    """Return the tree of commands with their options and arguments."""
    return _node(get_command(app), ())


def _node(command: Any, path: tuple[str, ...]) -> dict[str, Any]:
    options: dict[str, Any] = {"-h": _help_option(hidden=True), "--help": _help_option(hidden=False)}
    arguments = []
    for param in command.params:
        described = _parameter(param, path)
        if param.param_type_name == "argument":
            arguments.append(described)
        else:
            options |= {
                name: {**described, "hidden": param.hidden or not name.startswith("--")}
                for name in (*param.opts, *param.secondary_opts)
            }
    return {
        "help": _sentence(command.get_short_help_str(200)),
        "options": options,
        "arguments": arguments,
        "commands": {
            name: _node(inner, (*path, name))
            for name, inner in getattr(command, "commands", {}).items()
            if not inner.hidden
        },
        "stops": not command.context_settings.get("allow_interspersed_args", True),
    }


def _help_option(*, hidden: bool) -> dict[str, Any]:
    about = {"name": "help", "values": 0, "choices": [], "kinds": [], "help": "Show this message and exit."}
    return {**about, "is_option": True, "hidden": hidden}


def _parameter(param: Any, path: tuple[str, ...]) -> dict[str, Any]:
    metavar = param.metavar or param.name
    plain = metavar.removesuffix("...")
    plain = plain[1:-1] if plain.startswith("[") and plain.endswith("]") else plain
    is_cluster = plain == "NAME" and path[:1] == ("cluster",)
    return {
        "name": param.name,
        "values": 0 if getattr(param, "is_flag", False) else param.nargs,
        "choices": [*_choices(param.type_descriptor.annotation), *EXTRA.get(plain, [])],
        "kinds": ["cluster"] if is_cluster else KINDS.get(plain, []),
        "help": _sentence(getattr(param, "help", None) or ""),
        "is_option": param.param_type_name == "option",
    }


def _choices(annotation: Any) -> list[str]:
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return [str(member.value) for member in annotation]
    if typing.get_origin(annotation) is typing.Literal:
        return [str(value) for value in typing.get_args(annotation)]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list):
        return [choice for part in typing.get_args(annotation) for choice in _choices(part)]
    return []


def _sentence(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:77] + "..."


def written() -> str:
    """Return the content of the file."""
    return json.dumps(command_table(), separators=(",", ":"), ensure_ascii=False) + "\n"


def main() -> int:
    Path(TABLE).write_text(written(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
