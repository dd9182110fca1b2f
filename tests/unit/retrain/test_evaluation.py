"""What an evaluation refuses, how it reads the metrics of scripts, and what it makes of a result."""

from __future__ import annotations

import math
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ddptrain.config.load import load_mapping
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.errors import UsageError
from ddptrain.model_registry.records import ModelFile, VersionRecord
from ddptrain.results.layout import RunLayout
from ddptrain.results.run_record import RunRecord, RunStatus
from ddptrain.retrain import evaluation
from ddptrain.retrain.evaluation import EvaluationTarget, evaluate, script_metrics


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(folder: Path, **fields: Any) -> ResolvedConfig:
    return load_mapping(fields, folder)


def script(folder: Path, **fields: Any) -> ResolvedConfig:
    return config(folder, workload={"script": "train.py", "metrics": "metrics.json", **fields})


def run(folder: Path, name: str, workload: str = "petnames", **fields: Any) -> EvaluationTarget:
    (folder / name).mkdir()
    record = RunRecord(run_id=name, workload=workload, status=RunStatus.SUCCEEDED, **fields)
    (folder / name / "run.json").write_text(record.to_json())
    return EvaluationTarget(name, folder / name)


def version(folder: Path, name: str, **metrics: float) -> EvaluationTarget:
    target = run(folder, name, "train.py")
    file = ModelFile("output/model.bin", 1, "0" * 64)
    record = VersionRecord("m", 1, "", "run", "train.py", 0, metrics, (file,))
    (target.folder / "version.json").write_bytes(record.to_json())
    return target


# --- Metrics of scripts ---


def test_metrics_of_a_script_are_read_also_nan(folder: Path) -> None:
    (folder / "metrics.json").write_text('{"val/loss": 2, "val/accuracy": NaN, "other": Infinity}')
    found = script_metrics(script(folder))
    assert found["val/loss"] == 2.0 and math.isnan(found["val/accuracy"]) and math.isinf(found["other"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*metrics.json"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "must have names and numbers"),
        ("{}", "has no metrics"),
        ('{"val/loss": "low"}', "must have names and numbers"),
        ('{"val/loss": true}', "must have names and numbers"),
    ],
)
def test_file_without_metrics_is_an_error(content: str | None, message: str, folder: Path) -> None:
    if content is not None:
        (folder / "metrics.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        script_metrics(script(folder))


def test_script_without_a_declared_file_is_an_error(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"workload\.metrics is not set"):
        script_metrics(script(folder, metrics=None))


def test_metrics_that_are_older_than_the_run_are_of_another_run(folder: Path) -> None:
    (folder / "metrics.json").write_text('{"val/loss": 2}')
    os.utime(folder / "metrics.json", (1000, 1000))
    assert script_metrics(script(folder), since=datetime.fromtimestamp(999, UTC)) == {"val/loss": 2.0}
    with pytest.raises(UsageError, match="is older than the run"):
        script_metrics(script(folder), since=datetime.fromtimestamp(1001, UTC))


def test_script_is_compared_with_the_recorded_metrics_of_a_version(folder: Path) -> None:
    (folder / "metrics.json").write_text('{"val/loss": 2}')
    targets = [run(folder, "new", "train.py"), version(folder, "m@1", **{"val/loss": 3.0}), version(folder, "m@2")]
    found = evaluate(script(folder), targets)
    assert found.scores == {"new": {"val/loss": 2.0}, "m@1": {"val/loss": 3.0}}
    assert found.failures == {"m@2": "m@2 has no recorded metrics"}
    assert found.notes == ("m@2 has no scores: m@2 has no recorded metrics",)
    with pytest.raises(UsageError, match="a script evaluates itself"):
        evaluate(script(folder), targets, data="more.csv")


# --- What cannot be evaluated ---


def test_function_without_evaluate_is_an_error(folder: Path) -> None:
    with pytest.raises(UsageError, match="as evaluate: module:function"):
        evaluate(config(folder, workload="mine:main"), [run(folder, "new", "mine:main")])


def test_target_of_another_workload_without_checkpoint_or_record_is_an_error(folder: Path) -> None:
    petnames = config(folder, workload="petnames")
    with pytest.raises(UsageError, match="is a model of the workload images, not of petnames"):
        evaluate(petnames, [run(folder, "dogs", "images")])
    with pytest.raises(UsageError, match="has no checkpoint"):
        evaluate(petnames, [run(folder, "empty")])
    with pytest.raises(UsageError, match="neither a run nor a version"):
        evaluate(petnames, [EvaluationTarget("none", folder / "none")])


def test_names_of_targets_differ(folder: Path) -> None:
    target = run(folder, "new")
    with pytest.raises(UsageError, match="name different things to evaluate, not new and new"):
        evaluate(config(folder, workload="petnames"), [target, target])


# --- Results ---


def result(folder: Path, value: Any, held_out: str = "") -> evaluation.Evaluation:
    target = run(folder, "evaluation", result=value)
    if held_out:
        (target.folder / "inputs").mkdir()
        (target.folder / "inputs" / "held_out.json").write_text(held_out)
    return evaluation._result(RunLayout(target.folder))
