"""`workload: images` with real processes: handwritten digits, and the configuration that is shipped."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.conftest import Cli, Finished


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


def lines_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_dir(folder) / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["rank"] == rank]


def test_small_network_reads_handwritten_digits(tmp_path: Path, run_cli: Cli, digits: Path) -> None:
    """Logistic regression gets 0.967 of them right."""
    small = {"architecture": "small_cnn", "image_size": 16, "epochs": 6, "batch_size": 16, "base_lr": 0.01}
    ended = run_cli("train", digits_config(tmp_path, digits, **small))
    assert ended.rc == 0, ended.stderr
    assert "1,797 images of 10 classes" in ended.stderr
    last = record(tmp_path)["last_metrics"]
    assert last["val/accuracy"] >= 0.975
    assert last["val/top5"] >= last["val/accuracy"]
    check_summary(tmp_path, ended, last)
    check_steps(tmp_path)
    check_predictions(tmp_path, last["val/accuracy"])
    check_checkpoint(tmp_path)
    with Image.open(run_dir(tmp_path) / "artifacts/images/examples/step-46-rank-0.png") as picture:
        assert picture.size == (8 * 16, 16)


def check_summary(folder: Path, ended: Finished, last: dict[str, float]) -> None:
    """run.json and the last lines have the metrics of the last epoch; train/loss, logged each step, of the last one."""
    told = re.findall(r"epoch 6/6: (.*), [\d,]+ images/s", ended.stdout)[0]
    figures = dict(each.rsplit(" ", 1) for each in told.split(", "))
    assert {"train/loss", "train/accuracy", "val/loss"} < figures.keys()
    del figures["train/loss"]
    assert {name: f"{last[name]:.4f}" for name in figures} == figures
    losses = [[line["train/loss"] for line in lines_of(folder, rank) if "train/loss" in line][-1] for rank in range(2)]
    assert last["train/loss"] == pytest.approx(sum(losses) / 2)
    assert f"train/loss {last['train/loss']:.4g}" in ended.stdout.partition("  last ")[2]


def check_steps(folder: Path) -> None:
    """Every rank has logged every step, and rank 0 the epochs."""
    for rank in range(2):
        steps = [line for line in lines_of(folder, rank) if "train/loss" in line]
        assert [line["step"] for line in steps] == [*range(1, len(steps) + 1)]
        assert steps[-1]["epoch"] == pytest.approx(6)
        assert steps[0]["train/learning_rate"] == pytest.approx(0.01 / 25)
    epochs = [line for line in lines_of(folder, 0) if "val/loss" in line]
    assert [line["epoch"] for line in epochs] == [1, 2, 3, 4, 5, 6]
    assert all({"val/accuracy", "val/top5", "train/accuracy", "samples_per_s"} <= line.keys() for line in epochs)


def check_predictions(folder: Path, accuracy: float) -> None:
    """Each image that was held out once, and as right as was logged."""
    files = sorted((run_dir(folder) / "artifacts/predictions").iterdir())
    assert [file.name for file in files] == ["rank-0.csv", "rank-1.csv"]
    rows = [row for file in files for row in csv.DictReader(file.read_text().splitlines())]
    manifest = json.loads((run_dir(folder) / "inputs/manifest.json").read_text())
    assert sorted(row["key"] for row in rows) == sorted(manifest["keys"][index] for index in manifest["val"])
    assert sum(row["label"] == row["prediction"] for row in rows) / len(rows) == pytest.approx(accuracy)


def check_checkpoint(folder: Path) -> None:
    checkpoints = run_dir(folder) / "checkpoints"
    best = checkpoints / (checkpoints / "best").read_text().strip()
    config = torch.load(best / "state.pt", weights_only=True)["extra"]["model_config"]
    assert (config["architecture"], config["classes"]) == ("small_cnn", [str(digit) for digit in range(10)])


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
