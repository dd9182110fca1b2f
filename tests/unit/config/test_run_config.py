"""The models: defaults, limits, checks over several fields, and the JSON schema."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ddptrain.config.json_schema import config_schema
from ddptrain.config.load import load_mapping
from ddptrain.config.rank_settings import StepProfile
from ddptrain.config.run_config import RunConfig
from ddptrain.config.types import default_name


def test_a_workload_is_all_that_a_run_needs() -> None:
    config = RunConfig(workload="petnames")
    assert config.name == "petnames"
    assert (config.cluster.backend, config.cluster.ranks, config.cluster.gpus) == ("local", "auto", "auto")
    assert (config.checkpoint.metric, config.results.dir) == ("val/loss", "runs")


@pytest.mark.parametrize(
    ("workload", "stem", "name"),
    [
        ("petnames", "my-file", "petnames"),
        ("vision.dogs:train", "Dogs v2", "dogs-v2"),
        ("vision.dogs:train", "", "train"),
        ("vision.dogs:__", "", "run"),
    ],
)
def test_a_run_is_named_after_its_workload_or_file(workload: str, stem: str, name: str) -> None:
    assert default_name(workload, stem) == name


@pytest.mark.parametrize("name", ["", "A", "-a", "a b", "a/b", "a\n", "ä", "a" * 65, ".."])
def test_a_name_that_is_unsafe_as_a_folder_is_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        RunConfig(workload="petnames", name=name)


@pytest.mark.parametrize("env", [{"A=B": "c"}, {"": "c"}, {"A": "\0"}, {"A": True}])
def test_an_environment_that_the_system_would_refuse_is_refused(env: Any) -> None:
    with pytest.raises(ValidationError):
        RunConfig(workload="petnames", env=env)


def test_repr_does_not_show_the_environment() -> None:
    assert "hunter2" not in repr(RunConfig(workload="petnames", env={"PASSWORD": "hunter2"}))


def test_every_reference_of_the_schema_leads_somewhere() -> None:
    schema = config_schema()

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from (below for key, below in value.items() if key == "$ref")
            value = list(value.values())
        if isinstance(value, list):
            for below in value:
                yield from references(below)

    assert {reference.removeprefix("#/$defs/") for reference in references(schema)} <= set(schema["$defs"])


def test_loading_a_configuration_imports_neither_torch_nor_dask() -> None:
    code = (
        "import sys, ddptrain.config.load as c, ddptrain.config.plugin_names as r\n"
        "r.params_model('petnames')\n"
        "print([m for m in ('torch', 'distributed', 'dask', 'typer', 'rich', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_script_is_a_file_or_a_module_and_its_arguments_are_text() -> None:
    config = RunConfig.model_validate({"workload": {"script": "a/My Train.py", "args": ["--lr", 0.1, 3]}})
    assert config.script is not None and config.script.args == ["--lr", "0.1", "3"]
    assert (config.name, config.workload_name) == ("my-train", "a/My Train.py")
    module = RunConfig.model_validate({"workload": {"module": "a.b.__main__"}})
    assert (module.name, module.workload_name) == ("b", "-m a.b.__main__")
    assert RunConfig.model_validate({"workload": "petnames"}).script is None


@pytest.mark.parametrize("ranks", ["auto", 8, {"min": 1, "max": 8}])
def test_ranks_that_may_exist_are_accepted(tmp_path: Path, ranks: object) -> None:
    data = {"workload": "petnames", "cluster": {"ranks": ranks}, "profile": {"steps": [10, 13], "ranks": [7]}}
    profile = load_mapping(data, tmp_path).config.profile
    assert profile is not None and profile.spec == StepProfile(10, 13, (7,))


@pytest.mark.parametrize(
    ("checkpoint", "early", "expected"),
    [
        ({}, {}, ("val/loss", "min")),
        ({"metric": "val/accuracy"}, {}, ("val/accuracy", "max")),
        ({"metric": "val/error", "mode": "max"}, {}, ("val/error", "max")),
        ({"metric": "val/error", "mode": "max"}, {"metric": "val/loss"}, ("val/loss", "min")),
        ({}, {"metric": "valid_f1"}, ("valid_f1", "max")),
        ({}, {"metric": "val/f1", "mode": "min"}, ("val/f1", "min")),
        ({"metric": None}, {"metric": "mapping_error"}, ("mapping_error", "min")),
        ({}, {"metric": "val/top5"}, ("val/top5", "max")),
        ({"metric": "val/accuracy"}, {"metric": None, "mode": None}, ("val/accuracy", "max")),
    ],
)
def test_stop_early_follows_the_metric_of_checkpoints(
    checkpoint: dict[str, Any], early: dict[str, Any], expected: tuple[str, str]
) -> None:
    config = RunConfig.model_validate(
        {"workload": "petnames", "checkpoint": checkpoint, "stop_early": {"patience": 3, **early}}
    )
    assert config.stop_early is not None
    assert (config.stop_early.metric, config.stop_early.mode) == expected


@pytest.mark.parametrize(
    ("checkpoint", "mode"),
    [({}, "min"), ({"metric": "val/accuracy"}, "max"), ({"metric": "val/accuracy", "mode": "min"}, "min")],
)
def test_best_checkpoint_has_the_highest_value_of_a_metric_whose_name_says_so(
    checkpoint: dict[str, Any], mode: str
) -> None:
    config = RunConfig.model_validate({"workload": "w:f", "checkpoint": checkpoint})
    assert config.checkpoint.mode == mode


@pytest.mark.parametrize(
    "early", [{}, {"patience": 0}, {"patience": 1, "min_delta": -1.0}, {"patience": 1, "metric": 3}]
)
def test_stop_early_that_is_impossible_is_refused(early: Any) -> None:
    with pytest.raises(ValidationError):
        RunConfig(workload="petnames", stop_early=early)
    with pytest.raises(ValidationError):
        RunConfig.model_validate({"workload": "w:f", "checkpoint": {"metric": None}, "stop_early": {"patience": 2}})
