"""Weights of one's own are looked at before any rank is started: what a run can't begin with is told at once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ddptrain.errors import UsageError
from ddptrain.rank.context import RankContext
from ddptrain.workloads.images.data.listing import prepare
from ddptrain.workloads.images.data.manifest import FILE
from ddptrain.workloads.images.model import initial_weights
from ddptrain.workloads.images.model.build_model import MEAN, STD, build, describe
from ddptrain.workloads.images.model.initial_weights import PretrainedWeights, begin_with_weights, described_model
from ddptrain.workloads.images.params import ImagesParams

CLASSES = ["cat", "dog", "owl"]


def pretrained(n_outputs: int = 7, architecture: str = "small_cnn") -> dict[str, Tensor]:
    return build(describe(architecture, 32, [str(number) for number in range(n_outputs)])).state_dict()


class Preparing:
    """What the command has done before any rank is started, with small images of three classes."""

    def __init__(self, folder: Path) -> None:
        self.inputs, self.source, self.said = folder / "inputs", folder / "source", list[str]()
        self.inputs.mkdir()
        for name in CLASSES:
            (self.source / name).mkdir(parents=True)
            for number in range(3):
                (self.source / name / f"{number}.jpg").touch()

    def __call__(self, weights: object, **params: Any) -> None:
        settings = {"architecture": "small_cnn", "image_size": 32, "source": str(self.source)}
        prepare({**settings, "weights": str(weights), **params}, self.inputs, self.said.append)

    def refused(self, weights: object, **params: Any) -> str:
        """What is told where they are refused, and nothing is left that another try would use."""
        with pytest.raises(UsageError) as caught:
            self(weights, **params)
        assert "\n" not in str(caught.value) and not (self.inputs / FILE).exists()
        return str(caught.value)

    @property
    def is_done(self) -> bool:
        return (self.inputs / FILE).exists()


@pytest.fixture
def preparing(tmp_path: Path) -> Preparing:
    return Preparing(tmp_path)


def test_weights_of_another_model_are_told_with_names_shapes_and_what_to_do(
    tmp_path: Path, preparing: Preparing
) -> None:
    weights = tmp_path / "w.safetensors"
    save_file(pretrained() | {"features.0.weight": torch.zeros(16, 1, 3, 3)}, weights)
    assert preparing.refused(weights) == (
        f"the weights {weights} are not of small_cnn: of another shape: features.0.weight (16x1x3x3, not 16x3x3x3), "
        "head.weight (7x64, not 3x64), head.bias (7, not 3); set params.architecture to that of the weights, or "
        "params.weights to others, or to null"
    )
    told = preparing.refused(weights, architecture="resnet18")
    assert told.startswith(f"the weights {weights} are not of resnet18: missing: conv1.weight, bn1.weight, ")
    assert re.search(r" and \d+ more; unknown: (features|head)\.", told)


class Touching:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_weights_that_would_run_code_are_refused_and_nothing_is_run(tmp_path: Path, preparing: Preparing) -> None:
    weights, touched = tmp_path / "w.pth", tmp_path / "touched"
    torch.save({"head.weight": Touching(touched)}, weights)
    told = preparing.refused(weights)
    assert told.startswith(f"{weights} is not loaded, because it contains more than tensors, which may run code: ")
    assert not touched.exists()


def test_file_that_is_whole_and_holds_other_things_is_refused(tmp_path: Path, preparing: Preparing) -> None:
    weights = tmp_path / "w.pth"
    torch.save({"epoch": 3}, weights)
    assert preparing.refused(weights).startswith(f"{weights} contains no weights: expected a state dict")


@pytest.mark.parametrize("form", ["safetensors", "state dict", "before torch 1.6"])
def test_weights_of_the_model_pass_whatever_their_form_and_their_head(
    tmp_path: Path, preparing: Preparing, form: str
) -> None:
    weights = tmp_path / "w.bin"
    if form == "safetensors":
        save_file(pretrained(), weights)
    else:
        torch.save(pretrained(), weights, _use_new_zipfile_serialization=form != "before torch 1.6")
    preparing(weights)
    assert preparing.is_done


def test_weights_pass_for_a_model_that_computes_its_shapes(tmp_path: Path, preparing: Preparing) -> None:
    save_file(pretrained(architecture="regnet_x_400mf"), tmp_path / "w.bin")
    preparing(tmp_path / "w.bin", architecture="regnet_x_400mf")
    assert preparing.is_done


def test_head_that_the_label_map_does_not_name_is_refused(tmp_path: Path, preparing: Preparing) -> None:
    weights, labels = tmp_path / "w.bin", tmp_path / "labels.json"
    save_file(pretrained(7), weights)
    labels.write_text(json.dumps(dict(enumerate([*CLASSES, "elk"]))))
    told = preparing.refused(weights, label_map=str(labels))
    assert told.startswith(f"the weights {weights} have 7 outputs, but params.label_map names 4")
    labels.write_text(json.dumps(dict(enumerate([*CLASSES, "elk", "fox", "gnu", "hare"]))))
    preparing(weights, label_map=str(labels))
    assert preparing.is_done


# --- as a run begins with them ---


class Beginning:
    """Rank 0 of a run of a thousand classes begins with weights of a thousand outputs; gives the head it has then."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = folder / "w.safetensors"
        self.theirs = pretrained(1000, "squeezenet1_1")
        save_file(self.theirs, self.path)
        known = PretrainedWeights(self.path.as_uri(), MEAN, STD, 300)
        monkeypatch.setattr(initial_weights, "find_pretrained", lambda *_: known)
        monkeypatch.setattr(initial_weights, "weights_file", lambda *_: self.path)
        self.ctx = cast("RankContext", SimpleNamespace(rank=0, inputs=None, progress=lambda *_, **__: None))

    def keeps_head(self, weights: str, **params: Any) -> bool:
        settings = ImagesParams(architecture="squeezenet1_1", weights=weights, image_size=64, **params)
        described = described_model(settings, [f"class {number}" for number in range(1000)])
        model = build(described)
        begin_with_weights(self.ctx, settings, model, described)
        assert torch.equal(model.state_dict()["features.0.weight"], self.theirs["features.0.weight"])
        return torch.equal(model.state_dict()["classifier.1.weight"], self.theirs["classifier.1.weight"])


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Beginning:
    return Beginning(tmp_path, monkeypatch)


def test_torchvisions_head_is_replaced_where_the_classes_are_as_many_by_chance(
    begun: Beginning, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not begun.keeps_head("DEFAULT")
    assert capsys.readouterr().out == (
        f"weights: {begun.path}; their head of 1,000 outputs is replaced by a new one of 1,000 (params.label_map keeps "
        "it)\nthese weights were made for images of 300 pixels, params.image_size is 64\n"
    )


def test_head_is_kept_with_a_label_map_or_in_a_file_of_ones_own(
    begun: Beginning, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "labels.json").write_text(json.dumps({number: f"class {number}" for number in range(1000)}))
    assert begun.keeps_head("DEFAULT", label_map=str(tmp_path / "labels.json"))
    capsys.readouterr()
    assert begun.keeps_head(str(begun.path))
    assert capsys.readouterr().out == f"weights: {begun.path}\n", "what sizes they were made for is not known"


def test_names_of_torchvisions_weights_are_not_looked_at(preparing: Preparing) -> None:
    preparing("DEFAULT", architecture="resnet18")
    assert preparing.is_done and len(preparing.said) == 1
