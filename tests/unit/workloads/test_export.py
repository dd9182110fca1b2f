"""Exported weights have a description of what they need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddptrain.errors import UsageError
from ddptrain.file_ops import hash_file
from ddptrain.workloads.export import describe_model, export_model
from tests.unit.workloads.images_runs import description, make_run, model_of_colours
from tests.unit.workloads.test_petnames_generate import save_checkpoint, untrained

SOURCE = {"model": "pets", "version": 3}


def petnames(folder: Path, context: str) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text('{"workload": "petnames"}')
    save_checkpoint(folder, untrained(context))
    return folder


def images(folder: Path) -> Path:
    return make_run(folder, description(), (1, 0.5, model_of_colours(description())))


def test_weights_are_exported_with_what_they_need(tmp_path: Path) -> None:
    files = export_model(images(tmp_path / "run"), "images", tmp_path / "out", SOURCE)
    assert files == ["README.md", "model.json", "model.safetensors"]
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    assert about["outputs"] == ["blue", "green", "red"] and about["architecture"]["name"] == "small_cnn"
    assert about["preprocessing"]["normalisation"]["mean"] == [0.5, 0.5, 0.5]
    assert about["input"]["dtype"] == "float32" and (about["model"], about["version"]) == ("pets", 3)
    assert about["files"]["model.safetensors"]["sha256"] == hash_file(tmp_path / "out" / "model.safetensors")[1]
    own = load_file(next((tmp_path / "run" / "checkpoints").glob("step-*")) / "model.safetensors")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == own.keys()


@pytest.mark.parametrize(("context", "shape", "scores"), [("window", 8, 1), ("full", 65, 65)])
def test_description_of_a_model_of_names(context: str, shape: int, scores: int, tmp_path: Path) -> None:
    about = describe_model(petnames(tmp_path / "run", context), "petnames")
    assert (about["input"]["shape"], about["output"]["shape"]) == (["batch", shape], ["batch", scores, 31])
    assert about["alphabet"]["symbols"].startswith(about["alphabet"]["blank"])
    assert about["architecture"]["context"] == context


def test_model_of_a_function_is_described_by_its_tensors(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    save_file({"weight": torch.zeros(2, 3)}, checkpoint / "model.safetensors")
    (checkpoint.parent / "best").write_text("step-1\n")
    export_model(tmp_path / "run", "mine:main", tmp_path / "out", {"model": "mine"})
    assert json.loads((tmp_path / "out" / "model.json").read_text())["tensors"] == {"weight": [2, 3]}


def test_existing_folder_is_left_alone(tmp_path: Path) -> None:
    run = images(tmp_path / "run")
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        export_model(run, "images", tmp_path / "out", SOURCE)
    assert list((tmp_path / "out").iterdir()) == []


def test_nothing_is_left_if_an_export_fails(tmp_path: Path) -> None:
    run = images(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="can't write the model"):
        export_model(run, "images", tmp_path / "file" / "out", SOURCE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]
