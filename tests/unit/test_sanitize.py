"""What of a foreign text reaches a terminal."""

from __future__ import annotations

import pytest

from ddptrain.sanitize import sanitized

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
