"""The version whose weights a run starts from: chosen once, verified, and kept when the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddptrain.config.load import load_mapping
from ddptrain.config.resolved import ResolvedConfig
from ddptrain.driver.transfer.inputs import CONTENTS, RunInputs
from ddptrain.driver.transfer.starting_weights import fetch_weights
from ddptrain.errors import UsageError
from ddptrain.model_registry.records import RegistryDamaged, VersionRecord
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.protocol.rank_spec import FILE, StartingWeights


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    """Two versions of dogs; the first one is the champion."""
    found = ModelRegistry.open(str(tmp_path / "models"))
    for number in (1, 2):
        files: dict[str, Path | bytes] = {
            f"checkpoints/step-{number}/model.safetensors": f"weights {number}".encode(),
            "inputs/manifest.json": json.dumps({"classes": ["husky", "pug"]}).encode(),
        }
        found.add_version("dogs", files, VersionRecord("", 0, "", f"run-{number}", "images", number, {}, ()))
    found.promote("dogs", 1)
    return found


def config(tmp_path: Path, weights: str | None, **fields: Any) -> ResolvedConfig:
    data = {"workload": "images", "models": {"dir": str(tmp_path / "models")}, **fields}
    return load_mapping({**data, "params": {"weights": weights}}, tmp_path)


def test_alias_becomes_a_version_and_its_weights_get_into_the_inputs(registry: ModelRegistry, tmp_path: Path) -> None:
    resolved, weights = fetch_weights(config(tmp_path, "model:dogs@champion"), None)
    assert resolved.config.params["weights"] == "model:dogs@1" and "model:dogs@1" in resolved.yaml_text
    assert weights is not None
    inputs = RunInputs("", tmp_path / "inputs", weights)
    inputs.begin({}, {})
    inputs.wait(pytest.fail)
    assert (tmp_path / "inputs" / FILE).read_bytes() == b"weights 1"
    record = StartingWeights.read(tmp_path / "inputs")
    assert record is not None and (record.version, record.classes) == (1, ("husky", "pug"))
    listed = json.loads((tmp_path / "inputs" / CONTENTS).read_text())["files"]
    assert listed[FILE]["sha256"] == record.sha256


def test_run_that_goes_on_keeps_its_version(registry: ModelRegistry, tmp_path: Path) -> None:
    first, weights = fetch_weights(config(tmp_path, "model:dogs@champion"), None)
    run = tmp_path / "run"
    assert weights is not None
    run.mkdir()
    (run / "config.yaml").write_text(first.yaml_text)
    weights.put(run / "inputs")
    registry.promote("dogs", 2)
    again, fetched = fetch_weights(config(tmp_path, "model:dogs@champion"), run)
    assert again.config.params["weights"] == "model:dogs@1" and fetched is None
    (run / "inputs" / FILE).write_bytes(b"changed")  # fetched again, and still the first version
    again, fetched = fetch_weights(config(tmp_path, "model:dogs@champion"), run)
    assert again.config.params["weights"] == "model:dogs@1" and fetched is not None
    assert fetch_weights(config(tmp_path, "model:dogs@champion"), None)[0].config.params["weights"] == "model:dogs@2"


def test_weights_that_change_while_they_are_copied_are_an_error(registry: ModelRegistry, tmp_path: Path) -> None:
    _, weights = fetch_weights(config(tmp_path, "model:dogs"), None)
    assert weights is not None
    weights.file.write_bytes(b"weights X")
    with pytest.raises(UsageError, match="has changed while it was copied"):
        weights.put(tmp_path / "inputs")
    assert not (tmp_path / "inputs" / FILE).exists() and StartingWeights.read(tmp_path / "inputs") is None


def test_damaged_version_is_refused_and_the_file_is_named(registry: ModelRegistry, tmp_path: Path) -> None:
    path = tmp_path / "models/dogs/versions/1/checkpoints/step-1/model.safetensors"
    path.write_bytes(b"Weights 1")
    with pytest.raises(RegistryDamaged, match=r"step-1/model\.safetensors"):
        fetch_weights(config(tmp_path, "model:dogs"), None)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("model:cats@champion", "there is no model cats.*models.dir is"),
        ("model:dogs@9", "has no version 9"),
        ("model:dogs@best", "has no alias best"),
        ("model:../dogs", "is not a model name"),
        ("model:", "is not a model name"),
    ],
)
def test_unknown_version_is_an_error(weights: str, message: str, registry: ModelRegistry, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"params.weights: .*{message}"):
        fetch_weights(config(tmp_path, weights), None)


def test_model_of_another_workload_is_an_error(registry: ModelRegistry, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a model of the workload images, not of petnames"):
        fetch_weights(config(tmp_path, "model:dogs@1", workload="petnames"), None)


def test_version_without_weights_is_an_error(tmp_path: Path) -> None:
    made = ModelRegistry.open(str(tmp_path / "models"))
    files: dict[str, Path | bytes] = {"notes/model.safetensors": b"x", "checkpoints/step-1/optimizer.bin": b"y"}
    made.add_version("dogs", files, VersionRecord("", 0, "", "run-1", "images", 1, {}, ()))
    with pytest.raises(UsageError, match=r"params\.weights: version 1 of dogs has no file model\.safetensors"):
        fetch_weights(config(tmp_path, "model:dogs@1"), None)


@pytest.mark.parametrize("lost", ["inputs/" + FILE, "config.yaml"])
def test_run_that_has_lost_a_file_gets_its_weights_again(registry: ModelRegistry, tmp_path: Path, lost: str) -> None:
    first, weights = fetch_weights(config(tmp_path, "model:dogs@champion"), None)
    run = tmp_path / "run"
    run.mkdir()
    assert weights is not None
    (run / "config.yaml").write_text(first.yaml_text)
    weights.put(run / "inputs")
    (run / lost).unlink()
    again, fetched = fetch_weights(config(tmp_path, "model:dogs@champion"), run)
    assert again.config.params["weights"] == "model:dogs@1" and fetched is not None
