"""Errors of the command line's parser in the format of all other errors: one line, with the value and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from typer.core import TyperGroup

from ddptrain.config.wording import nearest, shorten
from ddptrain.errors import UsageError


class RootGroup(TyperGroup):
    """The group of all commands; the parser's errors are raised as UsageError."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the options before the command. Raises UsageError."""
        with _as_usage_error():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Parse the options of the command, and run it. Raises UsageError, and what the command raises."""
        with _as_usage_error():
            return super().invoke(ctx)


@contextmanager
def _as_usage_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the parser's exceptions are private in typer; others go on unchanged
        # Without arguments, the "error" is the help.
        if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
            raise
        raise UsageError(describe(error)) from None


def describe(error: Any) -> str:
    """Describe an error of the parser: what is wrong, the value, and the command's help."""
    ctx = getattr(error, "ctx", None)
    text = _what(error, ctx)
    return f"{text}; see {ctx.command_path} --help" if ctx is not None else text


def _what(error: Any, ctx: Any) -> str:
    kind = type(error).__name__
    message = str(error.format_message())
    param = getattr(error, "param", None)
    if kind == "NoSuchOption":
        known = [name for each in ctx.command.params for name in each.opts] if ctx is not None else []
        options = [option for option in known if option.startswith("--")]
        return f"there is no option {shorten(error.option_name)}{_did_you_mean(error.option_name, options)}"
    if ctx is not None and (command := re.match(r"No such command '(.*?)'", message)):
        hint = _did_you_mean(command[1], ctx.command.list_commands(ctx))
        return f'there is no command "{shorten(command[1])}"{hint}'
    if kind == "MissingParameter" and param is not None and ctx is not None:
        usage = re.sub("[{}]", "", " ".join(ctx.command.collect_usage_pieces(ctx))).replace("......", "...")
        return f"{_name(param)} is missing: write {ctx.command_path} {usage}"
    if kind == "BadParameter" and param is not None:
        return f"{_name(param)}: {_wrong_value(error)}"
    return message[:1].lower() + message[1:].rstrip(".").replace("(s)", "")


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    match = nearest(name, known)
    return f" (did you mean {match}?)" if match else ""


def _name(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.metavar or param.name)
    return "/".join(param.opts)


def _wrong_value(error: Any) -> str:
    """What is wrong with the value of an option; typer's message leaves it out."""
    message = str(error.message).removeprefix("Value error, ")
    cause = error.__cause__
    details = cause.errors(include_url=False)[0] if hasattr(cause, "errors") else {}
    if not message.startswith("Input should be ") or "input" not in details:
        return message.rstrip(".")
    expected = message.removeprefix("Input should be ").partition(", unable to")[0].rstrip(".")
    return f'must be {expected}, got "{shorten(str(details["input"]))}"'
