"""Models from a description, what they make of pixels, and weights that are loaded into them."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ddptrain.errors import UsageError
from ddptrain.rank.checkpoint.weights import with_module_versions
from ddptrain.workloads.images.model import (
    MEAN,
    STD,
    BadWeights,
    ModelInput,
    build,
    built_model,
    describe,
    find_pretrained,
    fit,
    read,
)

CLASSES = ["cat", "dog", "owl"]


def load(
    model: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    config: dict[str, Any],
    source: str,
    *,
    keep_head: bool,
    new_head: bool = False,
) -> int | None:
    """Load the weights that fit, as a run does."""
    fitting, others = fit(model, state, config, source, keep_head=keep_head, new_head=new_head)
    model.load_state_dict(with_module_versions(model, fitting), strict=False)
    return others


def described(architecture: str = "resnet18", size: int = 64, classes: list[str] | None = None) -> dict[str, Any]:
    return describe(architecture, size, classes or CLASSES)


@pytest.mark.parametrize("size", [8, 15, 33, 224])
def test_small_cnn_takes_images_of_any_size_and_has_few_weights(size: int) -> None:
    model = build(describe("small_cnn", size, [str(digit) for digit in range(10)]))
    assert model(torch.zeros(2, 3, size, size)).shape == (2, 10)
    assert 20_000 < sum(weight.numel() for weight in model.parameters()) < 30_000


@pytest.mark.parametrize(
    ("architecture", "size"),
    [("googlenet", 64), ("inception_v3", 96), ("squeezenet1_1", 64)],
)
def test_models_of_every_kind_give_a_score_for_each_class(architecture: str, size: int) -> None:
    config = described(architecture, size)
    model = built_model(config)
    assert model.training
    assert model(torch.zeros(2, 3, size, size)).shape == (2, 3)
    assert build(config).state_dict().keys() == model.state_dict().keys()


def test_maxvit_is_made_for_the_size_of_the_images() -> None:
    with torch.device("meta"):
        build(described("maxvit_t", 224))
    with pytest.raises(UsageError, match="maxvit_t can't take images of 100 x 100 pixels"):
        build(described("maxvit_t", 100))


@pytest.mark.parametrize(("architecture", "size"), [("alexnet", 32), ("vit_b_16", 100), ("inception_v3", 32)])
def test_images_that_a_model_cannot_take_are_told_before_training(architecture: str, size: int) -> None:
    with pytest.raises(UsageError, match=rf"{architecture} can't take images of {size} x {size} pixels: .*image_size"):
        built_model(described(architecture, size))


def test_unknown_architecture_is_told() -> None:
    with pytest.raises(UsageError, match="no classification model 'fcn_resnet50'"):
        build(described("fcn_resnet50"))


@pytest.mark.parametrize("channels_last", [False, True])
def test_pixels_have_the_mean_and_deviation_that_the_weights_want(*, channels_last: bool) -> None:
    images = torch.randint(0, 256, (2, 5, 4, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    pixels = ModelInput(described(), torch.device("cpu"), channels_last=channels_last)(images)
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    torch.testing.assert_close(pixels, (images / 255 - mean) / std)
    assert pixels.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_weights_of_a_name_have_a_url_and_their_own_normalisation() -> None:
    found = find_pretrained("resnet50", "DEFAULT")
    assert found.url.endswith("resnet50-11ad3fa6.pth")
    assert (found.transforms().mean, found.transforms().std) == ([*MEAN], [*STD])
    with pytest.raises(BadWeights, match="resnet50 has no weights 'IMAGENET1K_V7'"):
        find_pretrained("resnet50", "IMAGENET1K_V7")


def pretrained(n_outputs: int = 7) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return build(described("small_cnn", classes=[str(k) for k in range(n_outputs)])).state_dict()


@pytest.mark.parametrize("form", ["safetensors", "state dict", "wrapped", "of DDP"])
def test_weights_are_read_in_every_usual_form(tmp_path: Path, form: str) -> None:
    path, state = tmp_path / "weights.bin", pretrained()
    if form == "safetensors":
        save_file(state, path)
    elif form == "wrapped":
        torch.save({"epoch": 3, "model": state}, path)
    else:
        torch.save({f"module.{name}": value for name, value in state.items()} if form == "of DDP" else state, path)
    found = read(path)
    assert all(torch.equal(found[name], value) for name, value in state.items())


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("how", ["torch.save", "pickle"])
def test_weights_that_would_run_code_are_refused_and_nothing_is_run(tmp_path: Path, how: str) -> None:
    path, touched = tmp_path / "weights.pth", tmp_path / "touched"
    if how == "pickle":
        path.write_bytes(pickle.dumps(Bomb(touched)))
    else:
        torch.save({"fc.weight": Bomb(touched)}, path)
    with pytest.raises(BadWeights, match=r"may run code(: [\w.]+)?; save .* safetensors") as caught:
        read(path)
    assert "\x1b" not in str(caught.value) and not touched.exists()


@pytest.mark.parametrize("data", [b"", b"half a file", b"\x08\0\0\0\0\0\0\0{nonsense", b"PK\x03\x04 and so on"])
def test_weights_that_are_damaged_are_told_with_their_path(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(data)
    with pytest.raises(BadWeights, match=re.escape(str(path))):
        read(path)


def test_head_of_another_size_is_replaced_and_all_else_is_loaded() -> None:
    config, state = described("small_cnn"), pretrained(7)
    model = build(config)
    before = model.state_dict()["head.weight"].clone()
    assert load(model, state, config, "w", keep_head=False) == 7
    after = model.state_dict()
    assert torch.equal(after["head.weight"], before)
    assert all(torch.equal(after[name], value) for name, value in state.items() if not name.startswith("head."))


@pytest.mark.parametrize("architecture", ["small_cnn", "squeezenet1_1", "regnet_y_400mf"])
def test_new_head_is_made_also_where_theirs_is_of_the_same_size(architecture: str) -> None:
    config = described(architecture)
    state = {name: value + 1 for name, value in build(config).state_dict().items()}
    model = build(config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert load(model, state, config, "w", keep_head=False, new_head=True) == 3
    kept = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert kept and {name.rpartition(".")[0] for name in kept} <= {"head", "classifier.1", "fc"}
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items() if name not in kept)


def test_head_that_the_label_map_does_not_fit_is_an_error() -> None:
    config = described("small_cnn")
    with pytest.raises(BadWeights, match=r"have 7 outputs, but params\.label_map names 3"):
        load(build(config), pretrained(7), config, "w", keep_head=True)


def test_weights_of_another_model_are_told_with_some_names() -> None:
    config = described("small_cnn")
    with pytest.raises(BadWeights, match=r"not of small_cnn: missing: features.0.weight.* and \d+ more; unknown"):
        load(build(config), {"fc.weight": torch.zeros(3, 4)}, config, "w", keep_head=False)
    bent = {**pretrained(3), "features.0.weight": torch.zeros(16, 1, 3, 3)}
    with pytest.raises(BadWeights, match=r"of another shape: features\.0\.weight"):
        load(build(config), bent, config, "w", keep_head=False)


def test_vision_transformer_takes_weights_made_for_another_size() -> None:
    with torch.device("meta"):
        small, large = described("vit_b_32", 64), described("vit_b_32", 96)
        shapes = build(small).state_dict()
    state = {name: torch.zeros(value.shape) for name, value in shapes.items()}
    model = build(large)
    assert load(model, state, large, "w", keep_head=False) is None
    assert model.state_dict()["encoder.pos_embedding"].shape[1] == 3 * 3 + 1


def test_weights_without_versions_do_for_a_model_that_asks_for_them() -> None:
    config = described("mnasnet0_5")
    state = dict(build({**config, "n_outputs": 5}).state_dict())
    model = build(config)
    assert load(model, state, config, "w", keep_head=False) == 5
    assert torch.equal(model.state_dict()["layers.0.weight"], state["layers.0.weight"])
