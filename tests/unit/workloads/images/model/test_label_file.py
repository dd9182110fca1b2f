"""The limits of files of labels."""

from __future__ import annotations

import pytest

from ddptrain.errors import UsageError
from ddptrain.workloads.images.model import label_file
from ddptrain.workloads.images.model.label_file import parse_labels


@pytest.mark.parametrize(
    ("name", "limit", "told"),
    [("MAX_BYTES", 5, "it has more than 5 bytes"), ("MAX_LABELS", 3, "it has 4 labels, more than 3")],
)
def test_files_up_to_the_limit_are_read(monkeypatch: pytest.MonkeyPatch, name: str, limit: int, told: str) -> None:
    monkeypatch.setattr(label_file, name, limit)
    assert len(parse_labels(b"a\nb\nc", "f").names) == 3
    with pytest.raises(UsageError, match=f"^no labels in f: {told}; it should contain"):
        parse_labels(b"a\nb\nc\nd", "f")


def test_label_of_2000_characters_is_one() -> None:
    assert parse_labels(b"x" * 2000, "f").names == ("x" * 2000,)
    with pytest.raises(UsageError, match=r"output 0: .* is not a label"):
        parse_labels(b"x" * 2001, "f")
