"""The texts of errors: one line, and problems with their parts."""

from __future__ import annotations

import pytest

from ddptrain.errors import ConfigError, ExitCode, Interrupted, Problem, one_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("first\nsecond"), "first"),
        (ValueError("\n  first  \nsecond"), "first"),
        (ValueError(), "ValueError"),
        (ValueError(" \n "), "ValueError"),
        ("first\r\nsecond", "first"),
        ("", ""),
    ],
)
def test_one_line_is_the_first_one_or_else_the_type(error: BaseException | str, line: str) -> None:
    assert one_line(error) == line


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("c.yaml:3", "a.b", "is wrong", "fix it"), "c.yaml:3: a.b: is wrong (fix it)"),
        (Problem("c.yaml", "", "is empty"), "c.yaml: is empty"),
        (Problem("", "params.x", "unknown key"), "params.x: unknown key"),
    ],
)
def test_problem_shows_only_the_parts_that_it_has(problem: Problem, text: str) -> None:
    assert str(problem) == text


def test_configuration_error_lists_its_problems_and_means_exit_code_2() -> None:
    error = ConfigError([Problem("a", "", "x"), Problem("b", "", "y")])
    assert (str(error), error.exit_code) == ("a: x\nb: y", ExitCode.USAGE)


def test_interruption_has_the_exit_code_of_its_signal() -> None:
    assert (Interrupted(2).exit_code, str(Interrupted(15))) == (130, "interrupted by SIGTERM")
