"""Errors and texts, and CI services."""

from __future__ import annotations

import pytest

from ddptrain import ci
from ddptrain.errors import UsageError, one_line
from ddptrain.sanitize import sanitized

# --- The texts of errors ---


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


# --- What of a foreign text reaches a terminal ---


ESC = "\x1b"


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain é 漢字 \u00a0 tab\tand\nline", "plain é 漢字 \u00a0 tab\tand\nline"),
        (f"a{ESC}]0;title\x07b", "ab"),
        (f"a{ESC}]52;c;cm0gLXJm{ESC}\\b", "ab"),
        (f"a{ESC}[2J{ESC}[31mb{ESC}c", "ab"),
        (f"never ends {ESC}]0;x\nnext line", "never ends 0;x\nnext line"),
        ("a\x00\x07\x08\x0b\x0d\x7f\x85\x9b2Jb", "a2Jb"),
        ("user\u202egnp.exe\u2066\u2069\u200e\u200f\u061c", "usergnp.exe"),
        ("zero\u200bwidth\ufeff\u2060\U000e0041\u180e", "zerowidth"),
        ("one\u2028two\u2029three", "onetwothree"),
        ("half \ud83d", "half "),
        (
            "family \U0001f468\u200d\U0001f469, \u0645\u06cc\u200c\u062e",
            "family \U0001f468\u200d\U0001f469, \u0645\u06cc\u200c\u062e",
        ),
    ],
)
def test_what_could_control_a_terminal_or_mislead_its_reader_goes(text: str, safe: str) -> None:
    assert sanitized(text) == safe
    assert sanitized(text, colours=True).replace(f"{ESC}[31m", "") == safe


def test_marks_keep_two_names_apart() -> None:
    assert sanitized(f"a{ESC}[1mb\u202e", mark="?") == "a?[1mb?"


# --- The CI service, and annotations exactly as GitHub parses them ---


GITHUB = {"GITHUB_ACTIONS": "true"}


@pytest.mark.parametrize(
    ("environ", "service"),
    [
        ({}, ""),
        ({"CI": "true"}, ""),
        (GITHUB, "github"),
        ({"GITHUB_ACTIONS": "false"}, ""),
        ({"GITLAB_CI": "true"}, "gitlab"),
        (GITHUB | {"DDPTRAIN_CI": "off"}, ""),
        (GITHUB | {"DDPTRAIN_CI": " OFF "}, ""),
        (GITHUB | {"DDPTRAIN_CI": ""}, "github"),
        ({"GITLAB_CI": "true", "DDPTRAIN_CI": "auto"}, "gitlab"),
    ],
)
def test_service_is_detected_from_the_environment(environ: dict[str, str], service: str) -> None:
    assert ci.ci_service(environ) == service


def test_unknown_value_of_the_switch_is_refused() -> None:
    with pytest.raises(UsageError, match=r'^DDPTRAIN_CI is "none": set it to off or auto, or unset it$'):
        ci.ci_service({"DDPTRAIN_CI": "none"})


def test_annotation_escapes_what_ends_a_property_or_a_line() -> None:
    assert (
        ci.annotation("error", "50%: a,\r\nb::c", title="x: y, z%", file="a,b:c.py", line=12)
        == "::error file=a%2Cb%3Ac.py,line=12,title=x%3A y%2C z%25::50%25: a,%0D%0Ab::c"
    )


def test_annotation_holds_no_control_characters() -> None:
    assert ci.annotation("error", "a\x1b[31mb\x00\u202ec") == "::error::abc"
