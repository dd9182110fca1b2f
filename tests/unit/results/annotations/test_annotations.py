from __future__ import annotations

import json

import pytest

from ddptrain.errors import UsageError
from ddptrain.results.annotations import Annotations, checked_note, tag_changes


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, Annotations()),
        (b'{"tags": ["good", "v2"], "note": "a\\nb"}', Annotations(("good", "v2"), "a\nb")),
        (b'{"tags": ["good", "good", "bad tag", 3, "\\u001b[31m", ""], "note": 5}', Annotations(("good",))),
        (b"[1]", Annotations()),
        (b"{", Annotations()),
        (b"[" * 100_000, Annotations()),
        (b'{"tags": "good"}', Annotations()),
    ],
)
def test_what_is_not_valid_is_left_out(data: bytes | None, expected: Annotations) -> None:
    assert Annotations.parse(data) == expected


def test_a_file_is_read_as_it_was_written() -> None:
    annotations = Annotations(("größe", "a/b:c"), "two\nlines")
    assert Annotations.parse(annotations.to_json()) == annotations


def test_tags_are_added_once_and_removed() -> None:
    annotations = Annotations(("a", "b"), "note").with_tags(["c", "a"], ["b", "x"])
    assert annotations == Annotations(("a", "c"), "note")
    with pytest.raises(UsageError, match="50 tags, not 51"):
        annotations.with_tags(f"t{number}" for number in range(49))


def test_words_are_changes() -> None:
    assert tag_changes(["+good", "plain", "-old"]) == (["good", "plain"], ["old"])
    with pytest.raises(UsageError, match="good is both added and removed"):
        tag_changes(["+good", "-good"])


@pytest.mark.parametrize("word", ["", "+", "-", "++a", "a b", "+_a", "x" * 65, "a\n", "+a\u202eb", "a,b"])
def test_invalid_tags_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="is not a tag"):
        tag_changes([word])


def test_notes_are_checked() -> None:
    assert checked_note(" two\nlines\t. \n") == "two\nlines\t."
    with pytest.raises(UsageError, match=r"U\+001B"):
        checked_note("a\x1b[31m")
    with pytest.raises(UsageError, match="4,001 characters"):
        checked_note("x" * 4001)


def test_fifty_tags_and_4000_characters_are_read_and_taken() -> None:
    tags = [f"t{number}" for number in range(51)]
    parsed = Annotations.parse(json.dumps({"tags": tags, "note": "x" * 4001}).encode())
    assert parsed == Annotations(tuple(tags[:50]), "x" * 4000)
    assert Annotations().with_tags(tags[:50]).tags == tuple(tags[:50])
    assert checked_note("x" * 4000) == "x" * 4000
    assert tag_changes(["x" * 64, "+" + "y" * 64]) == (["x" * 64, "y" * 64], [])
    with pytest.raises(UsageError, match=r"^a run can have 50 tags, not 51; remove some, as -t0$"):
        Annotations().with_tags(tags)


def test_file_of_annotations_is_indented_json() -> None:
    assert Annotations(("a",), "ä").to_json() == b'{\n  "tags": [\n    "a"\n  ],\n  "note": "\\u00e4"\n}\n'
