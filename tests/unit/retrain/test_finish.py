"""The stages in the report of a retraining."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddptrain.errors import ExitCode
from ddptrain.retrain.finish import _stages
from ddptrain.retrain.records import RetrainStatus, Stage
from ddptrain.retrain.start import End, Start


def reported(
    status: RetrainStatus, shown: list[dict[str, Any]], done: Stage = Stage.NONE
) -> list[tuple[str, str, str]]:
    """Name, status and detail of each stage; `shown` are those of this start, `done` is the last one of any start."""
    order = list(Stage)
    start = SimpleNamespace(
        out=SimpleNamespace(stages=[{"duration_s": 1.5, "message": "fine", **each} for each in shown]),
        is_done=lambda stage: order.index(done) >= order.index(stage),
    )
    found = _stages(cast(Start, start), End(status, ExitCode.SUCCEEDED, ""))
    return [(stage.name, stage.status, stage.detail) for stage in found]


def test_stages_of_an_earlier_start_are_named() -> None:
    shown: list[dict[str, Any]] = [
        {"stage": "lock"},
        {"stage": "evaluate"},
        {"stage": "gate", "passed": False},
        {"stage": "promote"},
    ]
    assert reported(RetrainStatus.REJECTED, shown, Stage.NOTIFY) == [
        ("lock", "done", "fine"),
        ("check data", "done", "by an earlier start"),
        ("train", "done", "by an earlier start"),
        ("evaluate", "done", "fine"),
        ("gate", "failed", "fine"),
        ("promote", "done", "fine"),
        ("notify", "skipped", ""),
        ("clean up", "skipped", ""),
    ]


@pytest.mark.parametrize(("status", "train"), [(RetrainStatus.FAILED, "failed"), (RetrainStatus.DEADLINE, "skipped")])
def test_only_the_first_stage_that_was_not_reached_has_failed(status: RetrainStatus, train: str) -> None:
    shown = [{"stage": "lock"}, {"stage": "check data"}, {"stage": "notify"}]
    assert [state for _, state, _ in reported(status, shown, Stage.CHECK_DATA)] == [
        *("done", "done"),
        train,
        *("skipped", "skipped", "skipped"),
        *("done", "skipped"),
    ]
