"""What is accepted under `params` of the image workload, and how what is not is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.config.load import load_config
from ddptrain.errors import ConfigError
from ddptrain.workloads.images.params import ImagesParams, architectures, weight_names

CONFIGS = Path(__file__).parents[3] / "configs"


def problem(tmp_path: Path, line: str) -> str:
    path = tmp_path / "images.yaml"
    path.write_text(f"workload: images\nparams:\n  epochs: 1\n  {line}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("architecture: zzz", "ours is small_cnn"),
        ("weights: IMAGENET1K_V3", "did you mean IMAGENET1K_V2?"),
        ("weights: s3://b/w.pth", "download the file, and give its path"),
        ("label_map: labels.txt", "names the outputs of params.weights, which are not set"),
        ("train_pct: 0.0", "params.train_pct: expected more than 0"),
        ("train_pct: 1.1", "params.train_pct: expected at most 1"),
        ("image_size: 7", "params.image_size: expected at least 8"),
        ("subset: 0", "params.subset: expected"),
        ("subset: []", "params.subset: expected"),
        ("scheduler: one-cycle", "did you mean one_cycle?"),
        ("cache: {max_bg: 1.0}", "did you mean params.cache.max_gb?"),
        ("base_rl: 0.1", "did you mean params.base_lr?"),
    ],
)
def test_what_is_wrong_is_told_with_line_key_and_hint(tmp_path: Path, line: str, expected: str) -> None:
    assert expected in problem(tmp_path, line)


def test_small_cnn_has_no_weights_of_torchvision(tmp_path: Path) -> None:
    told = problem(tmp_path, "weights: DEFAULT\n  architecture: small_cnn")
    assert "images.yaml:4: params.weights: small_cnn has no weights named DEFAULT" in told


def test_models_and_weights_are_those_that_torchvision_registers() -> None:
    from torchvision import models

    assert architectures() == ["small_cnn", *sorted(models.list_models(module=models))]
    for name in ("resnet50", "vit_b_16", "googlenet", "swin_v2_t", "maxvit_t"):
        assert weight_names(name) == sorted(models.get_model_weights(name).__members__)


def test_shipped_configurations_are_what_they_say() -> None:
    dogs = ImagesParams.model_validate(load_config(CONFIGS / "dogs.yaml").config.params)
    assert (dogs.source, dogs.source_options) == ("s3://saturn-public-data/dogs/Images", {"skip_signature": True})
    assert (dogs.architecture, dogs.weights, dogs.epochs, dogs.batch_size) == ("resnet50", "DEFAULT", 6, 64)
    assert (dogs.base_lr, dogs.optimizer, dogs.scheduler) == (3e-4, "adamw", "one_cycle")
    assert load_config(CONFIGS / "images-local.yaml").config.params["source"] == "builtin"
