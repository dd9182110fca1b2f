"""Errors of the command line's parser in the format of all other errors: one line, with the value and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperGroup

from ddptrain.config.wording import nearest, shorten
from ddptrain.errors import UsageError

_OTHER_NAMES = {  # what users of other tools type
    "resume": "ddptrain train CONFIG --resume RUN",
    "torchrun": "ddptrain run",
    "launch": "ddptrain train",
    "logs": "ddptrain results logs",
    "show": "ddptrain results show",
    "status": "ddptrain results show",
    "plot": "ddptrain results compare",
    "report": "ddptrain results report",
    "compare": "ddptrain results compare",
    "list": "ddptrain results list",
    "ls": "ddptrain results list",
    "sync": "ddptrain results sync",
    "registry": "ddptrain models",
    "promote": "ddptrain models promote",
    "kill": "ddptrain stop",
    "tune": "ddptrain sweep",
    "check": "ddptrain doctor",
    "ps": "ddptrain results list",
    "rm": "ddptrain results rm",
    "delete": "ddptrain results rm",
    "version": "ddptrain --version",
    "help": "ddptrain --help",
}
_OTHER_COMMANDS = {"ls": "list", "ps": "list", "delete": "rm", "remove": "rm"}  # of any group
_CONFIG_OPTIONS = ("config", "config-file", "file", "c")
_RANKS_OPTIONS = ("nproc", "nproc-per-node", "num-processes", "world-size", "np", "n")
# Commands and options of earlier versions.
_REMOVED = {
    "ddptrain schema": "ddptrain init --schema",
    "cluster check": "ddptrain doctor --cluster NAME",
    "cluster list": "ddptrain cluster status",
    "cluster scale": "ddptrain cluster down NAME, then up with --ranks",
    "results plot": "ddptrain results compare RUN",
    "results sweeps": "ddptrain results list --sweeps",
    "results tag": "ddptrain results edit RUN +TAG -TAG",
    "results note": "ddptrain results edit RUN --note TEXT",
    "results consolidate": "ddptrain results export RUN --format safetensors",
    "models history": "ddptrain models show MODEL --history",
    "models pin": "ddptrain models alias MODEL@NAME VERSION",
    "--junit": "write --report FILE.xml",
    "--full-traceback": "write --verbose",
    "--local-rank": "leave it out; the script reads LOCAL_RANK from its environment, as under torchrun",
    "--start-timeout": "write --set cluster.start_timeout_s=SECONDS",
}
_COMMON = {"--runs-dir": True, "--models-dir": True, "--verbose": False}  # of every command: whether it has a value


# The commands by what they are for, in the order of the help.
_SECTIONS = {
    "Train": ("train", "run", "watch", "stop", "results"),
    "Search and use": ("sweep", "evaluate", "predict", "generate"),
    "Clusters": ("cluster", "doctor"),
    "Unattended": ("retrain", "models", "schedule", "notify"),
    "More": ("init", "explain"),
}


class RootGroup(TyperGroup):
    """The group of all commands, in sections; the parser's errors are raised as UsageError."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options of all commands, wherever they stand; `run` has its own, before those of the script."""
        common, rest = _common_first(args)
        return super().parse_args(ctx, [*common, *rest])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands, a section each. A command that is in no section belongs to the last one."""
        known = {name for names in _SECTIONS.values() for name in names}
        others = tuple(name for name in self.list_commands(ctx) if name not in known)
        limit = formatter.width - 6 - max(map(len, self.list_commands(ctx)))
        for title, names in _SECTIONS.items():
            wanted = (*names, *others) if title == "More" else names
            commands = [(name, command) for name in wanted if (command := self.get_command(ctx, name)) is not None]
            with formatter.section(title):
                formatter.write_dl([(name, command.get_short_help_str(limit)) for name, command in commands])

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the options before the command. Raises UsageError."""
        with _as_usage_error():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Parse the options of the command, and run it. Raises UsageError, and what the command raises."""
        with _as_usage_error():
            return super().invoke(ctx)


def _common_first(args: list[str]) -> tuple[list[str], list[str]]:
    """Return the options of all commands, and the other words in their order."""
    common: list[str] = []
    rest: list[str] = []
    words = iter(args)
    for word in words:
        name, equals, _ = word.partition("=")
        if word == "--" or (word == "run" and not rest):
            return common, [*rest, word, *words]
        if name not in _COMMON:
            rest.append(word)
        else:
            common += [word, *([next(words, "")] if _COMMON[name] and not equals else [])]
    return common, rest


@contextmanager
def _as_usage_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the parser's exceptions are private in typer; other exceptions are raised again
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
        return f"there is no option {shorten(error.option_name)}{_option_hint(error.option_name, ctx)}"
    if ctx is not None and (command := re.match(r"No such command '(.*?)'", message)):
        return f'there is no command "{shorten(command[1])}"{_command_hint(command[1], ctx)}'
    if kind == "MissingParameter" and param is not None and ctx is not None:
        usage = " ".join(ctx.command.collect_usage_pieces(ctx))
        return f"{_name(param)} is missing: write {ctx.command_path} {usage}"
    if kind == "BadParameter" and param is not None:
        return f"{_name(param)}: {_wrong_value(error)}"
    text = message[:1].lower() + message[1:].rstrip(".").replace("(s)", "")
    field = re.search(r"extra arguments? \((?:params\.)?(\w+=[^ )]*)", text)
    return f"{text} (did you mean --set params.{shorten(field[1])}?)" if field else text


def _option_hint(name: str, ctx: Any) -> str:
    known = [option for each in ctx.command.params for option in each.opts] if ctx is not None else []
    if removed := _REMOVED.get(name):
        return f" ({removed})"
    known += _COMMON
    word = name.lstrip("-").replace("_", "-")
    if word in _CONFIG_OPTIONS and ctx is not None and any(each.metavar == "CONFIG" for each in ctx.command.params):
        return f" (the file needs no option: {ctx.command_path} FILE)"
    if word in _RANKS_OPTIONS and "--ranks" in known:
        return " (did you mean --ranks?)"
    match = nearest(word, [option[2:] for option in known if option.startswith("--")])
    if match:
        return f" (did you mean --{match}?)"
    if "--module" in known:
        return f" (arguments of the script come after it: SCRIPT {shorten(name)} ...)"
    return f" (a field is changed as --set {shorten(_field(name))}=VALUE)" if "--set" in known else ""


def _field(option: str) -> str:
    """The field that an option which does not exist probably stands for: of a section, or else of params."""
    from ddptrain.config.run_config import RunConfig
    from ddptrain.config.validation_errors import Schema

    name = option.lstrip("-").replace("-", "_")
    if "." in name:
        return name
    found = (key for key in Schema(RunConfig, None).keys() if key.rpartition(".")[2] == name)  # noqa: SIM118
    return next(found, f"params.{name}")


def _command_hint(name: str, ctx: Any) -> str:
    commands = ctx.command.list_commands(ctx)
    found = _REMOVED.get(f"{ctx.info_name} {name}", _OTHER_NAMES.get(name, "") if ctx.parent is None else "")
    if name.endswith((".yaml", ".yml")):
        verb = "train" if "train" in commands else "add" if "add" in commands else ""
        found = f"{ctx.command_path} {verb} {shorten(name)}" if verb else ""
    elif name.endswith(".py") and "run" in commands:
        found = f"{ctx.command_path} run {shorten(name)}"
    elif (other := _OTHER_COMMANDS.get(name, "")) in commands:
        found = found or f"{ctx.command_path} {other}"
    match = found or nearest(name, commands)
    return f" (did you mean {match}?)" if match else ""


def _name(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.metavar or param.name)
    return "/".join(param.opts)


def _wrong_value(error: Any) -> str:
    """Return what is wrong with the value of an option; typer's message leaves it out."""
    message = str(error.message).removeprefix("Value error, ")
    cause = error.__cause__
    details = cause.errors(include_url=False)[0] if hasattr(cause, "errors") else {}
    if not message.startswith("Input should be ") or "input" not in details:
        return message.rstrip(".")
    expected = message.removeprefix("Input should be ").partition(", unable to")[0].rstrip(".")
    return f'must be {expected}, got "{shorten(str(details["input"]))}"'
