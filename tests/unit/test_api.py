"""`ddptrain.launch` and `ddptrain.Run` as far as no run is needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ddptrain import api, run_handle
from ddptrain.api import launch
from ddptrain.errors import (
    ClusterError,
    ConfigError,
    DdptrainError,
    HangDetected,
    Interrupted,
    RunLocked,
    RunNotFound,
    RunPreempted,
    TrainingFailed,
    UsageError,
)
from ddptrain.run_handle import Run


def top_level(ctx: Any) -> None:
    """A function that ranks could import."""


def module_of(monkeypatch: pytest.MonkeyPatch, name: str, file: Path | None, **more: Any) -> Any:
    """A function `train` of a module that looks so."""
    module = ModuleType(name)
    vars(module).update({"__file__": str(file) if file else None, "__spec__": None, **more})
    namespace: dict[str, Any] = vars(module)
    exec("def train(ctx): pass", namespace)
    monkeypatch.setitem(sys.modules, name, module)
    return namespace["train"]


def test_function_of_a_module_is_named_with_the_folder_that_it_is_found_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = module_of(monkeypatch, "work", tmp_path / "work.py")
    nested = module_of(monkeypatch, "pack.sub.work", tmp_path / "pack" / "sub" / "work.py")
    package = module_of(monkeypatch, "pack.inner", tmp_path / "pack" / "inner" / "__init__.py")
    assert api._workload(plain) == ("work:train", tmp_path)
    assert api._workload(nested) == ("pack.sub.work:train", tmp_path)
    assert api._workload(package) == ("pack.inner:train", tmp_path)


def test_function_of_a_script_is_named_by_the_scripts_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    function = module_of(monkeypatch, "__main__", tmp_path / "experiment.py")
    assert api._workload(function) == ("experiment:train", tmp_path)
    spec = SimpleNamespace(name="pack.work")
    function = module_of(monkeypatch, "__main__", tmp_path / "pack" / "work.py", __spec__=spec)
    assert api._workload(function) == ("pack.work:train", tmp_path)


@pytest.mark.parametrize("file", [None, "my-script.py"])
def test_function_that_ranks_cannot_import_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, file: str | None
) -> None:
    function = module_of(monkeypatch, "__main__", Path(file) if file else None)
    with pytest.raises(UsageError, match="put it into a module"):
        launch(function)


def test_closure_is_refused() -> None:
    def inner(ctx: Any) -> None:
        pass

    for function in (inner, lambda ctx: None):
        with pytest.raises(UsageError, match="define it at its top level"):
            launch(function)


def test_function_that_is_not_what_its_module_has_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    function = module_of(monkeypatch, "work", tmp_path / "work.py")
    module_of(monkeypatch, "work", tmp_path / "work.py")
    with pytest.raises(UsageError, match=r"work\.train is not the function that was passed"):
        launch(function)


def test_launch_in_a_rank_names_the_missing_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPTRAIN_RUN_ID", "x")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="__name__"):
        launch(top_level)
    monkeypatch.undo()


def test_wrong_configuration_raises_here_with_its_problems(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        launch({"workload": "petnames", "params": {"epoch": 3}}, overrides=["checkpoint.keep=0"])
    where = {(problem.where, problem.key) for problem in raised.value.problems}
    assert where == {("the configuration", "params.epoch"), ("checkpoint.keep=0", "checkpoint.keep")}
    with pytest.raises(ConfigError, match="no such file"):
        launch(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"output": "quiet"}, "output is auto, plain, json or none, not 'quiet'"),
        ({"params": ["epochs"]}, r"params is a dict, not \['epochs'\]"),
    ],
)
def test_wrong_argument_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        launch({"workload": "petnames"}, **wrong)


def test_what_is_no_plain_data_is_refused() -> None:
    with pytest.raises(UsageError, match="plain data"):
        launch({"workload": "petnames"}, params={"epochs": object()})
    with pytest.raises(UsageError, match="not 3"):
        launch(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="overrides"):
        launch("petnames", overrides="params.epochs=3")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (1, TrainingFailed),
        (2, UsageError),
        (3, DdptrainError),
        (4, ClusterError),
        (5, HangDetected),
        (6, RunLocked),
        (75, RunPreempted),
        (130, Interrupted),
        (143, Interrupted),
        (-9, ClusterError),
    ],
)
def test_exit_code_of_the_driver_decides_what_is_raised(code: int, kind: type[DdptrainError]) -> None:
    error = run_handle.error_of(code, "cause")
    assert type(error) is kind
    assert code < 0 or error.exit_code == code


def test_run_of_another_process_is_found_and_read(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine-20260101-000000-abcd"
    for name in ("step-9", "step-10", "half"):
        (folder / "checkpoints" / name).mkdir(parents=True)
        if name != "half":
            (folder / "checkpoints" / name / "checkpoint.json").write_text("{}")
    (folder / "checkpoints" / "best").write_text("step-9\n")
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-1.log").write_text("hello\n")
    record = {"run_id": folder.name, "status": "failed", "exit_code": 1, "result": {"a": 1}}
    failure = {"rank": 1, "host": "h", "kind": "exception", "type": "ValueError", "message": "no\nmore"}
    (folder / "run.json").write_text(json.dumps({**record, "failure": failure}))
    (folder / "metrics.jsonl").write_text(
        '{"time_s": 1.0, "step": 3, "epoch": null, "rank": 0, "loss": 0.5}\n{"time_s": 2.0, "rank": 1, "x": null}\n'
    )
    run = Run.find("mine", tmp_path / "runs")
    assert (run.id, run.dir, run.status, run.exit_code, run.result) == (folder.name, folder, "failed", 1, {"a": 1})
    assert [path.name for path in run.checkpoints] == ["step-10", "step-9"]
    assert run.best is not None and run.best.name == "step-9"
    assert (run.logs(1), run.logs(0)) == ("hello\n", "")
    assert run.metrics() == [
        {"time_s": 1.0, "step": 3, "epoch": None, "rank": 0, "attempt": 1, "loss": 0.5},
        {"time_s": 2.0, "step": None, "epoch": None, "rank": 1, "attempt": 1, "x": None},
    ]
    assert repr(run) == f"<ddptrain.Run {folder.name}: failed>"
    with pytest.raises(TrainingFailed, match=r"rank 1 on h: ValueError: no$"):
        run.wait()
    with pytest.raises(RunNotFound):
        Run.find("other", tmp_path / "runs")
