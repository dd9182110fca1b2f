"""Which values of params.weights name a model, and the record of the weights in a run's inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.errors import UsageError
from ddptrain.protocol.rank_spec import FILE, StartingWeights, names_model, same_model, weights_in


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ("model:dogs@3", "model:dogs@champion", True),
        ("model:dogs@3", "model:dogs", True),
        ("model:dogs@3", "model:dogs@3", False),  # equal texts need no rule
        ("model:dogs@3", "model:dogs@4", False),
        ("model:dogs@3", "model:cats@champion", False),
        ("model:dogs@champion", "model:dogs@staging", False),
        ("model:dogs@3", "DEFAULT", False),
        (None, "model:dogs", False),
        ("model:dogs@3", None, False),
    ],
)
def test_alias_stands_for_the_version_that_was_recorded(before: object, now: object, expected: bool) -> None:
    assert same_model(before, now) is expected


def test_only_text_with_the_prefix_names_a_model() -> None:
    assert names_model("model:dogs@champion")
    assert not any(map(names_model, ("DEFAULT", "s3://model:x", "weights.pt", None, 3)))


def test_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = StartingWeights("dogs", 3, "abc", ("pug", "husky"))
    record.write(tmp_path)
    assert StartingWeights.read(tmp_path) == record and record.reference == "model:dogs@3"
    (tmp_path / "weights.json").write_text('{"model": 3}')
    assert StartingWeights.read(tmp_path) is None
    assert StartingWeights.read(tmp_path / "none") is None


def test_missing_weights_are_an_error(tmp_path: Path) -> None:
    for inputs in (None, tmp_path):
        with pytest.raises(UsageError, match="the weights of the model are missing"):
            weights_in(inputs)
    (tmp_path / FILE).write_bytes(b"x")
    assert weights_in(tmp_path) == tmp_path / FILE
