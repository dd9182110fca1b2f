"""Saved models, and models in other formats."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddptrain.errors import UsageError
from ddptrain.file_ops import hash_file
from ddptrain.workloads import checkpoint as saved_model
from ddptrain.workloads.checkpoint import check_workload, checkpoint_folder, load_checkpoint, load_trained
from ddptrain.workloads.export import describe_model, export_model
from ddptrain.workloads.images.model import build as build_model
from tests.unit.workloads.images_runs import description, make_run, model_of_colours
from tests.unit.workloads.test_petnames_generate import save_checkpoint, untrained

# --- Which checkpoint of a run is loaded, and what is refused ---


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for name in ("step-4", "step-8"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "best").write_text("step-4\n")
    (tmp_path / "checkpoints" / "latest").write_text("step-8\n")
    (tmp_path / "run.json").write_text(json.dumps({"workload": "petnames"}))
    return tmp_path


def test_best_checkpoint_comes_before_the_latest(run_dir: Path) -> None:
    assert checkpoint_folder(run_dir).name == "step-4"
    (run_dir / "checkpoints" / "best").unlink()
    assert checkpoint_folder(run_dir).name == "step-8"


def test_latest_is_taken_where_the_best_is_gone(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "step-4").rmdir()
    assert checkpoint_folder(run_dir) == run_dir / "checkpoints" / "step-8"


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc", "a/b", "a\\b"])
def test_pointer_that_leads_elsewhere_is_refused(run_dir: Path, name: str) -> None:
    (run_dir / "checkpoints" / "best").write_text(name)
    with pytest.raises(UsageError, match="which is not the name of a folder in it"):
        checkpoint_folder(run_dir)


@pytest.mark.parametrize("name", ["run.json", "checkpoints/best"])
def test_fifo_in_the_place_of_a_file_is_not_waited_for(run_dir: Path, name: str) -> None:
    (run_dir / name).unlink()
    os.mkfifo(run_dir / name)
    if name == "run.json":
        with pytest.raises(UsageError, match="it is not a regular file"):
            check_workload(run_dir, "petnames", "generate")
    else:
        assert checkpoint_folder(run_dir).name == "step-8"


def test_consolidated_checkpoint_is_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_text("{}")
    assert checkpoint_folder(tmp_path) == tmp_path


def test_run_without_a_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no checkpoint yet"):
        checkpoint_folder(tmp_path)


def test_run_of_another_workload_is_refused(run_dir: Path) -> None:
    check_workload(run_dir, "petnames", "generate")
    with pytest.raises(UsageError, match="is a run of the workload 'petnames'; predict needs one of images"):
        check_workload(run_dir, "images", "predict")
    (run_dir / "run.json").write_text("[]")
    with pytest.raises(UsageError, match="is not a run"):
        check_workload(run_dir, "petnames", "generate")


def test_trained_model_of_a_built_in_workload_is_loaded_in_eval_mode(tmp_path: Path) -> None:
    names, images = untrained("full"), build_model(description())
    save_checkpoint(tmp_path / "names", names)
    (tmp_path / "names" / "run.json").write_text('{"workload": "petnames"}')
    make_run(tmp_path / "images", description(), (1, 0.5, images))
    for workload, model in (("petnames", names), ("images", images)):
        found = load_trained(tmp_path / workload.removeprefix("pet"), workload)
        assert type(found) is type(model) and not found.training
        assert all(torch.equal(value, found.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("is_sharded", "how"),
    [
        (False, "load the weights of {}/model.safetensors there"),
        (
            True,
            (
                "write the weights of {} into one file with `ddptrain results export --format safetensors`, and load "
                "them there"
            ),
        ),
    ],
)
def test_model_of_users_own_code_is_not_loaded(
    is_sharded: bool, how: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_dir / "checkpoints" / "step-4"
    monkeypatch.setattr(saved_model, "is_sharded_checkpoint", lambda path: is_sharded and path == folder)
    with pytest.raises(UsageError) as refused:
        load_trained(run_dir, "mine:main")
    assert str(refused.value) == (
        f"only the code of mine:main can build its model: {how.format(folder)} with safetensors.torch.load_file"
    )


def build(saved: dict[str, int]) -> torch.nn.Module:
    return torch.nn.Linear(saved["size"], 1)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of a layer that multiplies by 3 and adds 0.5."""
    weights = {"weight": torch.tensor([[3.0]]), "bias": torch.tensor([0.5])}
    save_file(weights, tmp_path / "model.safetensors")
    torch.save({"extra": {"model_config": {"size": 1}}}, tmp_path / "state.pt")
    files = []
    for name in ("model.safetensors", "state.pt"):
        data = (tmp_path / name).read_bytes()
        files.append({"name": name, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    (tmp_path / "checkpoint.json").write_text(
        json.dumps({"step": 1, "world_size": 1, "epoch": None, "metrics": {}, "files": files})
    )
    return tmp_path


def test_reason_of_a_workload_against_a_checkpoint_is_told_as_it_is(checkpoint: Path) -> None:
    def refuse(saved: dict[str, int]) -> torch.nn.Module:
        raise UsageError(f"no model of size {saved['size']}")

    with pytest.raises(UsageError, match=r"^no model of size 1$"):
        load_checkpoint(checkpoint, "petnames", refuse)


def test_checkpoint_with_a_changed_bit_is_refused(checkpoint: Path) -> None:
    data = bytearray((checkpoint / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(data)
    with pytest.raises(UsageError, match=r"is damaged: the SHA-256 of model\.safetensors is not the one .*; restore"):
        load_checkpoint(checkpoint, "petnames", build)


def test_cut_checkpoint_is_refused(checkpoint: Path) -> None:
    size = (checkpoint / "state.pt").stat().st_size
    (checkpoint / "state.pt").write_bytes(b"12345")
    with pytest.raises(UsageError, match=rf"is damaged: state\.pt has 5 bytes, not {size}; restore"):
        load_checkpoint(checkpoint, "petnames", build)


# --- Exported weights have a description of what they need ---


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
