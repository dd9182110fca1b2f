"""What a user, or a program, sees of the stages."""

from __future__ import annotations

import json

import pytest

from ddptrain.model_registry.retrainings import GateOutcome, Stage
from ddptrain.retrain.start import StageOutput


def test_lines_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    out = StageOutput(as_json=False)
    out.stage(Stage.LOCK, "model names in models")
    out.notice("two\nlines \x1b[31mred")
    out.end("retrain names promoted: version 1", {})
    shown = capsys.readouterr()
    assert shown.err.splitlines()[:2] == ["ddptrain: lock: model names in models", "ddptrain: two"]
    assert "\x1b" not in shown.err
    assert shown.out == "retrain names promoted: version 1\n"


def test_last_object_contains_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    out = StageOutput(as_json=True)
    out.stage(Stage.LOCK, "model names in models", continued=False)
    out.stage(Stage.GATE, "rejected", conditions=(GateOutcome("val/loss", False, "NaN", float("nan")),))
    out.end("unused", {"status": "rejected", "exit_code": 7})
    *stages, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["event"], each["stage"]) for each in stages] == [("retrain_stage", "lock"), ("retrain_stage", "gate")]
    assert last["event"] == "retrain_finished" and last["exit_code"] == 7
    assert [each["stage"] for each in last["stages"]] == ["lock", "gate"]
    assert last["stages"][1]["conditions"] == [
        {"metric": "val/loss", "passed": False, "reason": "NaN", "candidate": None, "champion": None}
    ]
