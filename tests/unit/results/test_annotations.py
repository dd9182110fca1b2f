from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddptrain.errors import UsageError
from ddptrain.results.annotations import (
    FILE,
    Annotations,
    checked_note,
    edit_folder,
    tag_changes,
)
from ddptrain.results.run import Run


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


def test_words_are_changes() -> None:
    assert tag_changes(["+good", "plain", "-old"]) == (["good", "plain"], ["old"])
    with pytest.raises(UsageError, match="good is both added and removed"):
        tag_changes(["+good", "-good"])


@pytest.mark.parametrize("word", ["", "+", "-", "++a", "a b", "+_a", "x" * 65, "a\n", "+a\u202eb", "a,b"])
def test_invalid_tags_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="is not a tag"):
        tag_changes([word])


def test_fifty_tags_and_4000_characters_are_read_and_taken() -> None:
    tags = [f"t{number}" for number in range(51)]
    parsed = Annotations.parse(json.dumps({"tags": tags, "note": "x" * 4001}).encode())
    assert parsed == Annotations(tuple(tags[:50]), "x" * 4000)
    assert Annotations().with_tags(tags[:50]).tags == tuple(tags[:50])
    assert checked_note("x" * 4000) == "x" * 4000
    assert tag_changes(["x" * 64, "+" + "y" * 64]) == (["x" * 64, "y" * 64], [])
    with pytest.raises(UsageError, match=r"^a run can have 50 tags, not 51; remove some, as -t0$"):
        Annotations().with_tags(tags)


def test_changes_at_once_all_count(tmp_path: Path) -> None:
    def add(number: int) -> Annotations:
        return edit_folder(tmp_path, lambda before: before.with_tags([f"t{number}"]))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(24)))
    assert sorted(Run(tmp_path).annotations.tags) == sorted(f"t{number}" for number in range(24))
    assert {path.name for path in tmp_path.iterdir()} == {FILE, f".{FILE}.lock"}


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text('{"tags": ["secret"]}')
    run = tmp_path / "run"
    run.mkdir()
    (run / FILE).symlink_to(tmp_path / "other")
    assert Run(run).annotations == Annotations()
    edit_folder(run, lambda before: before.with_tags(["a"]))
    assert not (run / FILE).is_symlink() and (tmp_path / "other").read_text() == '{"tags": ["secret"]}'
