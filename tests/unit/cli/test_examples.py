"""The examples in --help: every command has some, and its parser accepts them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from ddptrain.cli.main import app


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield " ".join(path), command
    for name, each in (inner or {}).items():
        yield from commands(each, (*path, name))


COMMANDS = dict(commands(get_command(app)))
# A command keeps its --help as the first context makes it: without the root's settings it would have no -h for others.
ROOT = get_command(app).make_context("ddptrain", ["--help"], resilient_parsing=True)


def test_every_command_has_examples() -> None:
    assert [name for name, command in COMMANDS.items() if not command.examples] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_accepted_by_the_parser(name: str) -> None:
    for line in COMMANDS[name].examples:
        assert line == f"ddptrain {name}" or line.startswith(f"ddptrain {name} ")
        words = shlex.split(line.removeprefix(f"ddptrain {name}").partition(" > ")[0])
        COMMANDS[name].make_context(name, words, parent=ROOT).close()


@pytest.mark.parametrize("name", COMMANDS)
def test_usage_names_arguments_in_capitals_with_brackets_around_optional_ones(name: str) -> None:
    command = COMMANDS[name]
    usage = " ".join(command.collect_usage_pieces(command.context_class(command, parent=ROOT)))
    argument = r"[A-Z|@]+(\[@ALIAS\|@VERSION\])?"
    assert re.fullmatch(rf"\[OPTIONS\]( (-- )?({argument}|\[(-- )?[-+A-Z|]+\])(\.\.\.)?)*", usage), usage


def test_help_ends_with_the_examples_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        get_command(app)(["explain", "--help"])
    assert capsys.readouterr().out.endswith("Examples:\n    ddptrain explain 5\n    ddptrain explain latest\n")


@pytest.mark.parametrize("group", ["", "results", "models", "cluster", "schedule", "notify"])
def test_list_of_commands_has_whole_sentences_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        get_command(app)([*group.split(), "--help"])
    commands = capsys.readouterr().out.partition("Commands:\n" if group else "Train:\n")[2].splitlines()
    assert commands and not [line for line in commands if line.endswith("...")]


def test_help_of_train_fits_on_one_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        get_command(app)(["train", "--help"])
    printed = capsys.readouterr().out
    assert 24 <= len(printed.splitlines()) <= 40
    assert printed.index("--ranks") < printed.index("\nMore:\n") < printed.index("--report")


def test_option_that_may_be_repeated_names_its_value_and_not_a_type() -> None:
    unnamed = [
        f"{name} {option.opts[0]}"
        for name, command in COMMANDS.items()
        for option in command.params
        if option.param_type_name == "option" and option.multiple and not option.metavar
    ]
    assert not unnamed
