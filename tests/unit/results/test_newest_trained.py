"""The newest run that `generate latest` and `predict latest` can use."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.errors import RunNotFound
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView, newest_trained
from ddptrain.results.run_record import RunRecord


def view(run_id: str, workload: str, *checkpoints: str) -> RunView:
    return RunView(
        RunLayout(Path("runs") / run_id), RunRecord(run_id=run_id, workload=workload, checkpoints=checkpoints)
    )


VIEWS = (
    view("d", "petnames"),
    view("c", "images", "step-1"),
    view("b", "petnames", "step-2"),
    view("a", "petnames", "x"),
)


def test_runs_of_others_and_without_a_checkpoint_are_skipped() -> None:
    assert newest_trained(VIEWS, "petnames").run_id == "b"
    assert newest_trained(VIEWS, "images").run_id == "c"


def test_what_is_missing_is_named() -> None:
    with pytest.raises(RunNotFound, match=r"^no run of petnames in runs has a checkpoint yet"):
        newest_trained(VIEWS[:2], "petnames")
    with pytest.raises(RunNotFound, match=r"^there is no run of images in runs: train one first"):
        newest_trained(VIEWS[:1], "images")
