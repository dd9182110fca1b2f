"""What an evaluation refuses, and what it makes of a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddptrain.config.load import load_mapping
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.errors import UsageError
from ddptrain.results.run import Run
from ddptrain.results.run_record import RunRecord, RunStatus
from ddptrain.retrain import evaluation
from ddptrain.retrain.evaluation import EvaluationTarget, evaluate


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(folder: Path, **fields: Any) -> ResolvedConfig:
    return load_mapping(fields, folder)


def run(folder: Path, name: str, workload: str = "petnames", **fields: Any) -> EvaluationTarget:
    (folder / name).mkdir()
    record = RunRecord(run_id=name, workload=workload, status=RunStatus.SUCCEEDED, **fields)
    (folder / name / "run.json").write_text(record.to_json())
    return EvaluationTarget(name, folder / name)


# --- What cannot be evaluated ---


def test_function_without_evaluate_is_an_error(folder: Path) -> None:
    with pytest.raises(UsageError, match="as evaluate: module:function"):
        evaluate(config(folder, workload="mine:main"), [run(folder, "new", "mine:main")])
    with pytest.raises(UsageError, match="a script cannot be evaluated"):
        evaluate(config(folder, workload={"script": "train.py"}), [run(folder, "other", "train.py")])


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
    return evaluation._result(Run(target.folder))
