"""The parser of the command line: commands that are imported when they are called, --help, errors in our words."""

from __future__ import annotations

import importlib
import re
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info, get_group_from_info
from typer.models import CommandInfo, TyperInfo

from ddptrain.config.wording import nearest, shorten
from ddptrain.errors import UsageError

MORE = "More"  # the last section of options
OPTIONAL_NUMBER = "[RANK]"  # the metavar of options whose number may be left out
_COMMON = {"--runs-dir": True, "--models-dir": True, "--verbose": False}  # of every command: whether it has a value


class Command(TyperCommand):
    """A command. The help ends with the examples of its docstring; options of the panel MORE stand below the others."""

    def __init__(self, *args: Any, help: str | None = None, **settings: Any) -> None:  # noqa: A002  # typer's name
        """Take the examples out of the docstring."""
        text, _, examples = (help or "").partition("\n\nExamples:\n")
        self.examples = textwrap.dedent(examples).strip().splitlines()
        lines = ("\b", "Examples:", *(f"  {line}" for line in self.examples))  # \b: the lines are not joined
        super().__init__(*args, **{**settings, "help": text, "epilog": "\n".join(lines) if examples else None})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; an option of OPTIONAL_NUMBER may stand alone."""
        if ctx.allow_interspersed_args:  # else the words after the first argument belong to a script
            alone = {name for param in self.params if param.metavar == OPTIONAL_NUMBER for name in param.opts}
            words, args = deque(args), []
            while words:
                word = words.popleft()
                args.append(with_number(word, words) if word in alone else word)
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line; typer writes a required argument as {CONFIG}."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the options, and those of the panel MORE."""
        tables: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], MORE: []}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                is_argument = param.param_type_name == "argument"
                title = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
                tables[title].append(record)
        for title, rows in tables.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def with_number(option: str, following: deque[str]) -> str:
    """Return the option with the number that follows it, which is taken, or with 0."""
    return f"{option}={following.popleft() if following and following[0].isdecimal() else 0}"


class Commands(Mapping[str, Any]):
    """The commands of a group by name. typer reads the signature of each when it is asked for."""

    def __init__(self, makers: Mapping[str, Callable[[], Any]]) -> None:
        self._makers, self._made = makers, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        """Return a command."""
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._makers)

    def __len__(self) -> int:
        """Return the number of commands."""
        return len(self._makers)


def imported(name: str, place: str) -> Any:
    """Return the command at "module:function" in this package: a function, a CommandInfo or a Typer is there."""
    module, _, attribute = place.partition(":")
    found = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
    if not isinstance(found, typer.Typer):
        return _command(found if isinstance(found, CommandInfo) else CommandInfo(name, callback=found))
    empty = copy(found)
    empty.registered_commands = []
    group = get_group_from_info(
        TyperInfo(empty, name=name), pretty_exceptions_short=False, suggest_commands=False, rich_markup_mode=None
    )
    infos = {info.name or getattr(info.callback, "__name__", ""): info for info in found.registered_commands}
    makers = {name: partial(_command, info) for name, info in infos.items()}
    group.commands = Commands(makers)  # type: ignore[assignment]
    return group


def _command(info: CommandInfo) -> Any:
    info.cls = Command if info.cls in (None, TyperCommand) else info.cls
    return get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=None)


class RootGroup(TyperGroup):
    """The group of all commands, in sections; the parser's errors are raised as UsageError."""

    sections: ClassVar[Mapping[str, Mapping[str, tuple[str, str]]]]  # by title and name: the place, and its line
    table: ClassVar[Commands]

    def __init_subclass__(cls) -> None:
        """Make the table of the commands."""
        places = {name: place for section in cls.sections.values() for name, (place, _) in section.items()}
        cls.table = Commands({name: partial(imported, name, place) for name, place in places.items()})

    def __init__(self, **settings: Any) -> None:
        """Take the commands of the table."""
        super().__init__(**{**settings, "commands": self.table})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options of all commands, wherever they stand; `run` has its own, before those of the script."""
        common, rest = _common_first(args)
        return super().parse_args(ctx, [*common, *rest])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands, a section each."""
        for title, commands in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, line) for name, (_, line) in commands.items()])

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
        name, equals, given = word.partition("=")
        if word == "--" or (word == "run" and not rest):
            return common, [*rest, word, *words]
        if name not in _COMMON:
            rest.append(word)
        elif not _COMMON[name]:
            common.append(word)
        elif value := given if equals else next(words, ""):
            common += [name, value]
        else:  # such as --runs-dir $RUNS without RUNS: the default would be another folder than the user meant
            raise UsageError(f"{name} requires an argument: name a folder")
    return common, rest


# --- Errors: what is wrong, the value, and what to do ---

# Commands and options of earlier versions: a command, a group and a command, or an option.
_HINTS = {
    "resume": "ddptrain train CONFIG --resume RUN",
    "torchrun": "ddptrain run",
    "version": "ddptrain --version",
    "schema": "ddptrain init --schema",
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
    "--plot": "leave it out; ddptrain results report RUN RUN draws the curves in an HTML page",
}
_GROUPS = ("results", "cluster", "models", "schedule")
_OF_ANY_GROUP = {"ls": "list", "ps": "list", "delete": "rm", "remove": "rm"}
_CONFIG_OPTIONS = ("config", "config-file", "file", "c")
_RANKS_OPTIONS = ("nproc", "nproc-per-node", "num-processes", "world-size", "np", "n")


@contextmanager
def _as_usage_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the parser's exceptions are private in typer; other exceptions are raised again
        # Without arguments, the "error" is the help.
        if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
            raise
        ctx = getattr(error, "ctx", None)
        more = f"; see {ctx.command_path} --help" if ctx is not None else ""
        raise UsageError(f"{_described(error, ctx)}{more}") from None


def _described(error: Any, ctx: Any) -> str:
    kind, message, param = type(error).__name__, str(error.format_message()), getattr(error, "param", None)
    if kind == "NoSuchOption":
        return f"there is no option {shorten(error.option_name)}{_option_hint(error.option_name, ctx)}"
    if ctx is not None and (command := re.match(r"No such command '(.*?)'", message)):
        return f'there is no command "{shorten(command[1])}"{_command_hint(command[1], ctx)}'
    if kind in ("MissingParameter", "BadParameter") and param is not None:
        name = (param.metavar or param.name) if param.param_type_name == "argument" else "/".join(param.opts)
        if kind == "BadParameter":
            return f"{name}: {_wrong_value(error)}"
        return f"{name} is missing: write {ctx.command_path} {' '.join(ctx.command.collect_usage_pieces(ctx))}"
    text = message[:1].lower() + message[1:].rstrip(".").replace("(s)", "")
    field = re.search(r"extra arguments? \((?:params\.)?(\w+=[^ )]*)", text)
    if "extra argument" in text and ctx is not None and any("--set" in each.opts for each in ctx.command.params):
        hint = f"did you mean --set params.{shorten(field[1])}?" if field else "a field is changed as --set KEY=VALUE"
        return f"{text} ({hint})"
    return text


def _option_hint(name: str, ctx: Any) -> str:
    params = ctx.command.params if ctx is not None else []
    known = [*(option for each in params for option in each.opts), *_COMMON]
    word = name.lstrip("-").replace("_", "-")
    if hint := _HINTS.get(name):
        return f" ({hint})"
    if word in _CONFIG_OPTIONS and any(each.metavar == "CONFIG" for each in params):
        return f" (the file needs no option: {ctx.command_path} FILE)"
    if word in _RANKS_OPTIONS and "--ranks" in known:
        return " (did you mean --ranks?)"
    if match := nearest(word, [option[2:] for option in known if option.startswith("--")]):
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
    keys = Schema(RunConfig, None).keys()
    return next((key for key in keys if key.rpartition(".")[2].rstrip("s") == name.rstrip("s")), f"params.{name}")


def _command_hint(name: str, ctx: Any) -> str:
    commands: Mapping[str, Any] = ctx.command.commands
    word, is_root = _OF_ANY_GROUP.get(name, name), ctx.parent is None
    found = _HINTS.get(name if is_root else f"{ctx.info_name} {name}", "")
    if name.endswith((".yaml", ".yml")):
        verb = next((verb for verb in ("train", "add") if verb in commands), None)
        found = f"{ctx.command_path} {verb} {shorten(name)}" if verb else ""
    elif name.endswith(".py") and "run" in commands:
        found = f"{ctx.command_path} run {shorten(name)}"
    elif not found and is_root:
        group = next((each for each in _GROUPS if word in commands[each].commands), None)
        found = f"{ctx.command_path} {group} {word}" if group else ""
    elif not found and word in commands:
        found = f"{ctx.command_path} {word}"
    match = found or nearest(name, commands)
    return f" (did you mean {match}?)" if match else ""


def _wrong_value(error: Any) -> str:
    """Return what is wrong with the value of an option; typer's message leaves it out."""
    message = str(error.message).removeprefix("Value error, ")
    cause = error.__cause__
    details = cause.errors(include_url=False)[0] if hasattr(cause, "errors") else {}
    if not message.startswith("Input should be ") or "input" not in details:
        return message.rstrip(".")
    expected = message.removeprefix("Input should be ").partition(", unable to")[0].rstrip(".")
    return f'must be {expected}, got "{shorten(str(details["input"]))}"'
