"""The metrics that a script writes."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from ddptrain.errors import UsageError
from ddptrain.retrain.evaluation import Evaluation
from ddptrain.retrain.promotion import scores_text
from ddptrain.retrain.start import output_state, read_metrics


def test_metrics_of_a_script(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_text('{"val/loss": 2.5, "steps": 3, "broken": NaN}')
    found = read_metrics(path)
    assert found["val/loss"] == 2.5 and found["steps"] == 3.0 and math.isnan(found["broken"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[1]", r'must have names and numbers, such as \{"val/loss": 2.1\}, not \[1\]'),
        ('{"a": "b"}', "must have names and numbers"),
        ('{"a": true}', "must have names and numbers"),
        ('{"a": null}', "must have names and numbers"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_file_that_has_no_metrics(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "metrics.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=problem):
        read_metrics(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*: No such file"):
        read_metrics(tmp_path / "metrics.json")


def test_scores_in_one_line() -> None:
    scores = Evaluation({"candidate": {"b": 2.0, "a": 0.123456}, "champion": {"b": 3.0}}, notes=("noted",))
    assert scores_text(scores) == "a 0.1235, b 2 (champion 3); noted"
    assert scores_text(Evaluation({"candidate": {}})) == "no metrics"


def test_state_of_an_output_changes_when_it_is_written_again(tmp_path: Path) -> None:
    assert output_state(str(tmp_path / "nothing")) == ""
    folder = tmp_path / "out"
    folder.mkdir()
    file = folder / "model.bin"
    file.write_bytes(b"weights")
    before = output_state(str(folder))
    assert before == output_state(str(folder)) == output_state(str(file)) != ""
    os.utime(file, ns=(1, 1))
    assert output_state(str(folder)) not in ("", before)
