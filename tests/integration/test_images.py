"""`workload: images` with real processes: handwritten digits, weights of other models, parts of a source."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.conftest import Cli


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's 1,797 handwritten digits as a folder of images, half of them PNG, half JPEG."""
    from sklearn.datasets import load_digits

    root = tmp_path_factory.mktemp("digits")
    found = load_digits()
    for number, (pixels, digit) in enumerate(zip(found.images, found.target, strict=True)):
        folder = root / str(digit)
        folder.mkdir(exist_ok=True)
        image = Image.fromarray((pixels * (255 / 16)).astype("uint8")).resize((32, 32), Image.Resampling.NEAREST)
        image.save(folder / (f"{number:04d}.png" if number % 2 else f"{number:04d}.jpg"), quality=95)
    return root


def digits_config(folder: Path, digits: Path, **params: Any) -> Path:
    path = folder / "digits.yaml"
    settings = {"source": str(digits), "augmentation": "none", **params}
    config = {"workload": "images", "cluster": {"ranks": 2}, "params": settings}
    path.write_text(json.dumps({**config, "checkpoint": {"metric": "val/accuracy", "mode": "max"}}))
    return path


def run_dir(folder: Path) -> Path:
    (found,) = (folder / "runs").iterdir()
    return found


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir(folder) / "run.json").read_text())
    return found


def test_small_network_reads_handwritten_digits(tmp_path: Path, run_cli: Cli, digits: Path) -> None:
    """Logistic regression gets 0.967 of them right."""
    small = {"architecture": "small_cnn", "image_size": 16, "epochs": 6, "batch_size": 16, "base_lr": 0.01}
    ended = run_cli("train", digits_config(tmp_path, digits, **small))
    assert ended.rc == 0, ended.stderr
    assert "1,797 images of 10 classes" in ended.stderr
    last = record(tmp_path)["last_metrics"]
    assert last["val/accuracy"] >= 0.975
    assert last["val/top5"] >= last["val/accuracy"]
    with Image.open(run_dir(tmp_path) / "artifacts/images/examples/step-46-rank-0.png") as picture:
        assert picture.size == (8 * 16, 16)


def test_weights_of_another_model_end_the_command_before_any_rank_is_started(
    tmp_path: Path, run_cli: Cli, warm_cluster: str
) -> None:
    save_file({"fc.weight": torch.zeros(1000, 512)}, tmp_path / "resnet.safetensors")
    settings = {"source": "builtin", "architecture": "small_cnn", "weights": str(tmp_path / "resnet.safetensors")}
    config = {"workload": "images", "cluster": {"address": warm_cluster, "ranks": 2}, "params": settings}
    (tmp_path / "weights.yaml").write_text(json.dumps(config))
    ended = run_cli("train", tmp_path / "weights.yaml", "--run-id", "begun")
    assert ended.rc == 2, ended.stderr
    told = ended.stderr.splitlines()[-1]
    assert told.startswith(
        f"ddptrain: run begun failed: the weights {tmp_path}/resnet.safetensors are not of small_cnn:"
    )
    assert "; unknown: fc.weight; set params.architecture" in told and "Traceback" not in ended.stderr
    assert record(tmp_path)["attempts"] == []


def test_images_with_parts_of_their_own_train_and_validate_as_they_are_split(
    tmp_path: Path, run_cli: Cli, digits: Path
) -> None:
    """The validation images of a split source are scored."""
    for part, numbers in (("train", range(40)), ("val", range(40, 52))):
        for digit in ("0", "1"):
            folder = tmp_path / "split" / part / digit
            folder.mkdir(parents=True)
            images = sorted((digits / digit).iterdir())
            for number in numbers:
                (folder / images[number].name).symlink_to(images[number])
    small = {"architecture": "small_cnn", "image_size": 16, "epochs": 2, "batch_size": 16, "base_lr": 0.01}
    ended = run_cli("train", digits_config(tmp_path, tmp_path / "split", **small), "--run-id", "split")
    assert ended.rc == 0, ended.stderr
    assert "104 images of 2 classes" in ended.stderr and "80 to train on, 24 to validate with" in ended.stderr
    assert predicted_keys(tmp_path / "runs" / "split") == {"val"}


def predicted_keys(run: Path) -> set[str]:
    """The first folders of the keys of all predictions, of which there are as many as images to validate with."""
    tables = sorted((run / "artifacts" / "predictions").glob("rank-*.csv"))
    rows = [row for table in tables for row in csv.DictReader(table.read_text().splitlines())]
    assert len(rows) == 24
    return {row["key"].split("/")[0] for row in rows}
