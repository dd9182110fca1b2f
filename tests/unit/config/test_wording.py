"""How keys and values are shown in errors."""

from __future__ import annotations

import pytest

from ddptrain.config.wording import counted, describe_value, did_you_mean, dotted, listed, nearest, shorten


def test_text_is_cut_and_its_control_characters_are_escaped() -> None:
    assert shorten("a\x1b[31m\n") == "a\\u001b[31m\\u000a"
    assert shorten("x" * 81) == "x" * 77 + "..."


def test_only_the_first_names_of_a_list_are_told() -> None:
    assert listed(["a", "b", "c", "d", "e"], 5) == "a, b, c, d, e"
    assert listed([*"abcdefg"], 5) == "a, b, c, d, e and 2 more"
    assert listed(["x" * 50], 5) == "x" * 37 + "..."


def test_key_has_dots_and_indices() -> None:
    assert dotted(("params", "layers", 2, "size")) == "params.layers[2].size"
    assert dotted(()) == ""


@pytest.mark.parametrize(
    ("value", "path", "text"),
    [
        (None, (), "nothing"),
        (True, (), "true"),
        (3, (), "3"),
        ("x", (), 'the text "x"'),
        ([1], (), "a list"),
        ({}, (), "a mapping"),
        ("hunter2", ("env", "PGPASSWORD"), "<left out>"),
        ("s3://u:hunter2@b", ("results", "dir"), 'the text "s3://<left out>@b"'),
    ],
)
def test_value_is_described_without_secrets(value: object, path: tuple[str, ...], text: str) -> None:
    assert describe_value(value, path) == text


def test_nearest_name_is_found_in_any_case() -> None:
    assert nearest("Epochz", ["epochs", "lr"]) == "epochs"
    assert nearest("zzz", ["epochs"]) is None
    assert did_you_mean("epochz", ["epochs", "lr"]) == "did you mean epochs?"
    assert did_you_mean("zzz", ["lr", "epochs"]) == "known are: epochs, lr"
    assert did_you_mean("zzz", []) == ""


def test_number_with_its_noun() -> None:
    assert [counted(1, "slot"), counted(2_000, "slot"), counted(2, "class")] == ["1 slot", "2,000 slots", "2 classes"]
