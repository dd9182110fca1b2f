"""How a run begins with weights: torchvision's own, or those of a file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ddptrain.rank.context import RankContext
from ddptrain.workloads.images.model import BadWeights, begin_with_weights, build, describe, described_model
from ddptrain.workloads.images.params import ImagesParams

CLASSES = [f"class {number}" for number in range(1000)]


def weights_of(n_outputs: int = 1000, architecture: str = "squeezenet1_1") -> dict[str, Tensor]:
    return build(describe(architecture, 64, [str(number) for number in range(n_outputs)])).state_dict()


class Beginning:
    """Rank 0 of a run of a thousand classes; torchvision's weights have a thousand outputs as well."""

    def __init__(self, folder: Path) -> None:
        self.path, self.theirs, self.said = folder / "w.safetensors", weights_of(), list[str]()
        save_file(self.theirs, self.path)
        hub = folder / "hub" / "checkpoints" / "squeezenet1_1-b8a52dc0.pth"
        hub.parent.mkdir(parents=True)
        torch.save(self.theirs, hub)
        ctx = SimpleNamespace(rank=0, inputs=None, progress=lambda *_, **__: None, say=self.said.append)
        self.ctx = cast("RankContext", ctx)

    def keeps_head(self, weights: str, **params: Any) -> bool:
        settings = ImagesParams(architecture="squeezenet1_1", weights=weights, image_size=64, **params)
        described = described_model(settings, CLASSES)
        model = build(described)
        begin_with_weights(self.ctx, settings, model, described)
        assert torch.equal(model.state_dict()["features.0.weight"], self.theirs["features.0.weight"])
        return torch.equal(model.state_dict()["classifier.1.weight"], self.theirs["classifier.1.weight"])


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Beginning:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    return Beginning(tmp_path)


def test_head_of_torchvision_is_replaced_also_if_there_are_as_many_classes(begun: Beginning) -> None:
    assert not begun.keeps_head("DEFAULT")
    assert begun.said == [
        "weights: DEFAULT; their head of 1,000 outputs is replaced by a new one of 1,000 (params.label_map keeps it)",
        "these weights were made for images of 224 pixels, params.image_size is 64",
    ]


def test_head_is_kept_with_a_label_map_or_in_a_file_of_ones_own(begun: Beginning, tmp_path: Path) -> None:
    (tmp_path / "labels.json").write_text(json.dumps(dict(enumerate(CLASSES))))
    assert begun.keeps_head("DEFAULT", label_map=str(tmp_path / "labels.json"))
    assert begun.keeps_head(str(begun.path))
    assert begun.said[-1] == f"weights: {begun.path}", "the size that they were made for is not known"


def test_weights_of_another_model_are_refused(begun: Beginning, tmp_path: Path) -> None:
    save_file(weights_of(7, "small_cnn"), tmp_path / "other.safetensors")
    with pytest.raises(BadWeights, match=r"other\.safetensors are not of squeezenet1_1: missing: features\."):
        begun.keeps_head(str(tmp_path / "other.safetensors"))
