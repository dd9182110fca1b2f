"""Exported models are loaded again, and give the same scores for batches of several sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ddptrain.errors import UsageError
from ddptrain.file_ops import hash_file
from ddptrain.workloads import export
from ddptrain.workloads.export import export_model, exported
from tests.unit.workloads.images_runs import description, make_run, model_of_colours
from tests.unit.workloads.test_petnames_generate import save_checkpoint, untrained

SOURCE = {"model": "pets", "version": 3}
BATCHES = (1, 5)


def petnames(folder: Path, context: str) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text('{"workload": "petnames"}')
    save_checkpoint(folder, untrained(context))
    return folder


def images(folder: Path) -> Path:
    return make_run(folder, description(), (1, 0.5, model_of_colours(description())))


def loaded_torch_export(folder: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.export.load(folder / "model.pt2").module()


def loaded_onnx(folder: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / "model.onnx")
    name = json.loads((folder / "model.json").read_text())["input"]["name"]
    return lambda batch: torch.from_numpy(np.asarray(session.run(None, {name: batch.numpy()})[0]))


LOADERS = {"torch-export": loaded_torch_export, "onnx": loaded_onnx}


def check_scores(kind: str, form: str, tmp_path: Path) -> None:
    """Export a model, and compare its scores with those of the exported one."""
    workload = "images" if kind == "images" else "petnames"
    run = images(tmp_path / "run") if kind == "images" else petnames(tmp_path / "run", kind)
    target = tmp_path / "new" / "out"
    assert export_model(run, workload, target, form, SOURCE) == sorted(
        ["README.md", "model.json", export.FORMATS[form]]
    )
    call = LOADERS[form](target)
    original = exported(run, workload)
    assert original.module is not None and original.example is not None
    for size in BATCHES:
        torch.manual_seed(size)
        batch = torch.randint(0, 31, (size, *original.example.shape[1:]), dtype=torch.uint8)
        with torch.no_grad():
            assert torch.allclose(call(batch), original.module(batch), atol=1e-4)
    about = json.loads((target / "model.json").read_text())
    assert about["input"]["shape"][1:] == list(original.example.shape[1:]) and about["model"] == "pets"
    name = export.FORMATS[form]
    assert about["files"][name]["sha256"] == hash_file(target / name)[1]
    assert about["input"]["name"] in (target / "README.md").read_text()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["images", "full"])
@pytest.mark.filterwarnings("ignore")  # torch's own
def test_exported_model_gives_the_scores_of_the_model(kind: str, tmp_path: Path) -> None:
    check_scores(kind, "torch-export", tmp_path)


def test_weights_are_exported_with_what_they_need(tmp_path: Path) -> None:
    export_model(images(tmp_path / "run"), "images", tmp_path / "out", "safetensors", SOURCE)
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    assert about["outputs"] == ["blue", "green", "red"] and about["architecture"]["name"] == "small_cnn"
    assert about["preprocessing"]["normalisation"]["mean"] == [0.5, 0.5, 0.5]
    assert about["input"]["dtype"] == "float32"
    own = load_file(next((tmp_path / "run" / "checkpoints").glob("step-*")) / "model.safetensors")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == own.keys()


@pytest.mark.parametrize(
    ("context", "shape", "scores", "content"),
    [
        ("window", ["batch", 8], ["batch", 1, 31], "the last 8 symbols, with blanks before the first character"),
        (
            "full",
            ["batch", 65],
            ["batch", 65, 31],
            "a blank, then the name, then any symbols: an output depends only on the symbols up to its position",
        ),
    ],
)
def test_description_of_a_model_of_names(
    context: str, shape: list[object], scores: list[object], content: str, tmp_path: Path
) -> None:
    found = exported(petnames(tmp_path / "run", context), "petnames")
    architecture = found.about["architecture"]
    assert found.about == {
        "workload": "petnames",
        "input": {"name": "symbols", "dtype": "uint8", "shape": shape, "content": content},
        "output": {
            "name": "scores",
            "dtype": "float32",
            "shape": scores,
            "content": "of each next symbol",
            "softmax": False,
        },
        "alphabet": {"symbols": "*+abcdefghijklmnopqrstuvwxyz-. ", "blank": "*", "stop": "+"},
        "architecture": architecture,
    }
    assert (architecture["context"], architecture["hidden_size"], architecture["layers"]) == (context, 8, 2)
    assert found.strict and found.example is not None
    assert (found.example.shape, found.example.dtype) == ((2, shape[1]), torch.uint8) and found.example.max() <= 30


def test_description_of_a_classifier_and_of_its_weights_alone(tmp_path: Path) -> None:
    found = exported(images(tmp_path / "run"), "images")
    image = {"name": "images", "dtype": "uint8", "shape": ["batch", 3, 16, 16], "channels": "RGB, 0 to 255"}
    assert found.about == {
        "workload": "images",
        "input": image,
        "output": {"name": "scores", "dtype": "float32", "shape": ["batch", 3], "softmax": False},
        "outputs": ["blue", "green", "red"],
        "preprocessing": {
            "crop": "the square in the centre whose side is 0.875 of the shorter side",
            "resize": [16, 16],
            "interpolation": "bilinear, antialiased",
            "normalisation": {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25], "of": "pixels / 255"},
        },
        "architecture": {"name": "small_cnn", "options": {}, "n_outputs": 3},
    }
    assert found.example is not None and found.example.shape == (2, 3, 16, 16) and not found.strict
    assert found.module is not None and not found.module.training
    weights = export._of_weights(found.about)
    assert weights["input"] == {**image, "dtype": "float32", "channels": "RGB, normalised: see preprocessing"}
    assert found.about["input"] == image and weights["output"] == found.about["output"]
    assert export._of_weights({"workload": "petnames", "input": image}) == {"workload": "petnames", "input": image}


@pytest.mark.parametrize(
    ("form", "loading"),
    [
        ("torch-export", 'model = torch.export.load("model.pt2").module()\nscores = model(symbols)'),
        (
            "onnx",
            'session = onnxruntime.InferenceSession("model.onnx")\nscores, = session.run(None, {"symbols": symbols})',
        ),
    ],
)
def test_readme_says_how_the_model_is_loaded(form: str, loading: str) -> None:
    about = {
        "run_id": "r-1",
        "input": {"name": "symbols", "dtype": "uint8", "shape": ["batch", 8]},
        "output": {"name": "scores", "dtype": "float32", "shape": ["batch", 1, 31]},
    }
    assert export._readme(about, form) == (
        f"# r-1\n\n```python\n{loading}\n```\n\n"
        "- input: `symbols`, uint8 [batch, 8]; the batch has any size\n"
        "- output: `scores`, float32 [batch, 1, 31]; the batch has any size\n\n"
        "`model.json` has all details: where the model comes from, its outputs, what its input must be.\n"
    )
    text = export._readme({"model": "pets", "run_id": "r-1"}, "safetensors")
    assert text.startswith(
        '# pets\n\n```python\nweights = safetensors.torch.load_file("model.safetensors")  # a tensor'
    )
    assert "input:" not in text and "output:" not in text


def test_description_names_the_source_the_form_and_each_file(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"hello")
    image = {"name": "images", "dtype": "uint8", "shape": ["batch", 3]}
    export._describe(
        tmp_path, export.Exported({"workload": "images", "input": image}), "onnx", {"model": "é", "version": 3}
    )
    text = (tmp_path / "model.json").read_text(encoding="utf-8")
    assert json.loads(text) == {
        "model": "é",
        "version": 3,
        "format": "onnx",
        "torch": torch.__version__,
        "files": {
            "model.onnx": {
                "size_bytes": 5,
                "sha256": "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824",
            }
        },
        "workload": "images",
        "input": image,
    }
    assert text.startswith('{\n  "model": "é",') and text.endswith("}\n")


def test_model_of_a_function_is_exported_as_weights_only(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    save_file({"weight": torch.zeros(2, 3)}, checkpoint / "model.safetensors")
    (checkpoint.parent / "best").write_text("step-1\n")
    export_model(tmp_path / "run", "mine:main", tmp_path / "out", "safetensors", {"model": "mine"})
    assert json.loads((tmp_path / "out" / "model.json").read_text())["tensors"] == {"weight": [2, 3]}
    with pytest.raises(UsageError, match="can be exported as safetensors only, not as onnx"):
        export_model(tmp_path / "run", "mine:main", tmp_path / "out2", "onnx", {})
    assert not (tmp_path / "out2").exists()


def test_existing_folder_is_left_alone(tmp_path: Path) -> None:
    run = images(tmp_path / "run")
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        export_model(run, "images", tmp_path / "out", "safetensors", SOURCE)
    with pytest.raises(UsageError, match="choose safetensors, torch-export, onnx"):
        export_model(run, "images", tmp_path / "new", "gguf", SOURCE)
    assert list((tmp_path / "out").iterdir()) == []


def test_nothing_is_left_if_an_export_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = images(tmp_path / "run")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "_describe", fail)
    with pytest.raises(UsageError, match=r"can't write the model to .*: No space left on device"):
        export_model(run, "images", tmp_path / "out", "safetensors", SOURCE)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_model_that_torch_cannot_export_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = images(tmp_path / "run")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("unsupported operator\ndetails")

    monkeypatch.setattr("torch.export.export", fail)
    with pytest.raises(
        UsageError, match="cannot export this model as torch-export: RuntimeError: unsupported operator;"
    ):
        export_model(run, "images", tmp_path / "out", "torch-export", SOURCE)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs onnx and onnxscript: pip install 'onnx>=1.17' 'onnxscript>=0.3'"):
        export._require_onnx()
