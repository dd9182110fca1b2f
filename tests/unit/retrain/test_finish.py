"""The message at the end of a retraining, and the stages in its report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddptrain.config.sections.retraining import NotifyConfig
from ddptrain.errors import ExitCode
from ddptrain.notify.heartbeat import Heartbeat
from ddptrain.notify.messages import Message
from ddptrain.notify.sender import Delivery
from ddptrain.retrain import finish
from ddptrain.retrain.finish import _stages, conclude
from ddptrain.retrain.records import RetrainRecord, RetrainStatus, Stage
from ddptrain.retrain.start import End, StageOutput, Start
from ddptrain.storage.store import StoreError


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


@pytest.mark.parametrize("readable", [True, False])
def test_failure_that_cannot_be_recorded_is_told(
    readable: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object) -> Any:
        raise StoreError("models can't be written: No space left on device")

    def sent(message: Message, urls: list[str], **options: object) -> list[Delivery]:
        titles.append(message.title)
        return [Delivery("json")]

    titles: list[str] = []
    monkeypatch.setattr(finish, "send", sent)
    notify = NotifyConfig.model_validate({"urls": ["json://127.0.0.1"]})
    config = SimpleNamespace(notify=notify, results=SimpleNamespace(dir="runs"), models=SimpleNamespace(dir="models"))
    records = SimpleNamespace(create=refuse, newest=lambda count: [] if readable else refuse(), late_told=lambda: "")
    start = SimpleNamespace(
        resolved=SimpleNamespace(config=config, secrets=(), path="names.yaml"),
        settings=SimpleNamespace(model="names"),
        records=records,
        record=None,
        new_record=lambda: RetrainRecord(0, "names", "2026-11-22T03:00:00.000Z"),
        earlier=[],
        out=StageOutput(as_json=False),
        heartbeat=Heartbeat(None),
        champion=refuse,
        is_done=lambda stage: False,
    )
    conclude(cast(Start, start), End(RetrainStatus.FAILED, ExitCode.CLUSTER, "the disk is full"), 1.0)
    assert titles == ["names: retraining failed: the disk is full"]
    assert "the end of the retraining is not recorded: models can't be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "holds_lock", "cleaned"),
    [
        (RetrainStatus.FAILED, True, True),  # a model that fails each night must not fill the disk
        (RetrainStatus.FAILED, False, False),  # another process retrains the model
        (RetrainStatus.INTERRUPTED, True, False),
        (RetrainStatus.UNCHANGED, True, False),
    ],
)
def test_failure_is_cleaned_up_as_a_training_is(
    status: RetrainStatus, holds_lock: bool, cleaned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RetrainRecord(1, "names", "2026-11-22T03:00:00.000Z")
    done: list[object] = []
    monkeypatch.setattr(finish, "_clean_up", done.append)
    start = SimpleNamespace(
        resolved=SimpleNamespace(config=SimpleNamespace(notify=NotifyConfig())),
        records=SimpleNamespace(update=lambda record: None),
        owner=SimpleNamespace(holds_lock=holds_lock),
        record=record,
        heartbeat=Heartbeat(None),
        is_done=lambda stage: False,
    )
    conclude(cast(Start, start), End(status, ExitCode.SUCCEEDED, ""), 1.0)
    assert bool(done) is cleaned
