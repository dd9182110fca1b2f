"""The image workload in real gloo groups of 1, 2 and 3 ranks: exact, whatever is uneven, and after a stop as well."""

from __future__ import annotations

import csv
import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from ddptrain.errors import UsageError
from ddptrain.workloads.images.data import Batch, Images
from ddptrain.workloads.images.listing import prepare
from ddptrain.workloads.images.manifest import Manifest
from ddptrain.workloads.images.model import ModelInput, build
from ddptrain.workloads.images.params import ImagesParams
from ddptrain.workloads.images.train import described_again
from tests.unit.workloads.petnames_ranks import run_ranks

# The limit is that of the three ranks that all tests look at, also on a machine with other work.
pytestmark = [pytest.mark.timeout(420), pytest.mark.slow]

SCRIPT = Path(__file__).with_name("images_ranks.py")
UNEVEN, TINY, STRAIGHT, STOPPED, GOES_ON, WITH_OTHERS, MAPPED, FULL_OF_BAD, SINGLES = range(9)
WORLD_SIZES = (1, 2, 3)
COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}
LABELS = ["sky", "blue", "red", "night", "green"]


def draw_folder(root: Path, each: int) -> str:
    """Images of three classes, of about their colours."""
    chance = random.Random(each)
    for name, colour in COLOURS.items():
        (root / name).mkdir(parents=True)
        for number in range(each):
            image = Image.new("RGB", (10, 12))
            image.putdata([tuple(part + chance.randint(-40, 40) for part in colour) for _ in range(120)])
            image.save(root / name / f"{number:02d}.png")
    return str(root)


def cases(root: Path) -> list[dict[str, Any]]:
    small = {
        "architecture": "small_cnn",
        "image_size": 8,
        "batch_size": 3,
        "augmentation": "none",
        "loader_workers": 0,
        "base_lr": 0.01,
        "train_pct": 0.7,
        "epochs": 2,
    }
    some = {**small, "source": str(root / "some")}
    uneven = {**some, "optimizer": "sgd", "scheduler": "cosine", "max_bad_fraction": 0.2}
    tiny = {**small, "source": str(root / "few"), "batch_size": 1, "scheduler": "none", "optimizer": "sgd"}
    straight = {**some, "source": str(root / "whole"), "augmentation": "crop", "scheduler": "one_cycle", "epochs": 3}
    mapped = {
        **straight,
        "epochs": 1,
        "optimizer": "sgd",
        "scheduler": "none",
        "base_lr": 1e-9,
        "weights": str(root / "five.safetensors"),
        "label_map": str(root / "labels.json"),
    }
    return [
        {"inputs": "some-inputs", "params": uneven},
        {"inputs": "few-inputs", "params": tiny},
        {"inputs": "whole-inputs", "params": straight},
        {"inputs": "whole-inputs", "params": straight, "stop_after": 3},
        {"inputs": "whole-inputs", "params": straight, "resume_from": f"case-{STOPPED}/checkpoint"},
        {
            "inputs": "whole-inputs",
            "params": straight,
            "resume_from": f"../world-2/case-{STOPPED}/checkpoint",
            "worlds": [3],
        },
        {"inputs": "whole-inputs", "params": mapped, "worlds": [2]},
        {"inputs": "some-inputs", "params": {**uneven, "max_bad_fraction": 0.05}, "worlds": [2], "fails": True},
        {"inputs": "few-inputs", "params": {**tiny, "architecture": "resnet18", "image_size": 32}, "worlds": [1]},
    ]


def make_inputs(root: Path, name: str, params: dict[str, Any]) -> Manifest:
    folder = root / f"{name}-inputs"
    folder.mkdir()
    prepare(params, folder, lambda _: None)
    return Manifest.read(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case, run by real gloo groups of 1, 2 and 3 ranks."""
    root = tmp_path_factory.mktemp("ranks")
    for name, each in (("some", 10), ("few", 2), ("whole", 10)):
        draw_folder(root / name, each)
    (root / "labels.json").write_text(json.dumps(dict(enumerate(LABELS))))
    torch.manual_seed(3)
    save_file(build({"architecture": "small_cnn", "n_outputs": len(LABELS)}).state_dict(), root / "five.safetensors")
    all_cases = cases(root)
    some = make_inputs(root, "some", all_cases[UNEVEN]["params"])
    make_inputs(root, "few", all_cases[TINY]["params"])
    make_inputs(root, "whole", all_cases[STRAIGHT]["params"])
    for index in some.val[:2]:  # of two ranks, each gets one
        (root / "some" / some.keys[index]).write_bytes(b"no image")  # since it was listed
    (root / "cases.json").write_text(json.dumps(all_cases))
    run_ranks(SCRIPT, root, WORLD_SIZES)
    return root


def ranks_of(runs: Path, world_size: int, case: int) -> list[dict[str, Any]]:
    folder = runs / f"world-{world_size}" / f"case-{case}"
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world_size)]


def checkpoint_of(runs: Path, world_size: int, case: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    folder = runs / f"world-{world_size}" / f"case-{case}" / "checkpoint"
    return load_file(folder / "model.safetensors"), torch.load(folder / "state.pt", weights_only=True)


def described(runs: Path, case: int) -> tuple[ImagesParams, Manifest]:
    found = json.loads((runs / "cases.json").read_text())[case]
    return ImagesParams(**found["params"]), Manifest.read(runs / found["inputs"])


def held_out_images(runs: Path, case: int) -> Batch:
    settings, manifest = described(runs, case)
    return Images(manifest, manifest.val, settings, None).__getitems__([(at, 0) for at in range(len(manifest.val))])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", [UNEVEN, TINY, STRAIGHT])
def test_all_ranks_together_take_every_image_in_each_epoch(runs: Path, world_size: int, case: int) -> None:
    settings, manifest = described(runs, case)
    taken = [index for rank in ranks_of(runs, world_size, case) for index in itertools.chain(*rank["images"])]
    assert {*taken} == {*manifest.train} and min(Counter(taken).values()) == settings.epochs
    assert len(taken) - settings.epochs * len(manifest.train) < settings.epochs * world_size, "few are repeated"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", [UNEVEN, STRAIGHT])
def test_validation_is_exact_over_uneven_ranks_and_leaves_bad_images_out(
    runs: Path, world_size: int, case: int
) -> None:
    weights, state = checkpoint_of(runs, world_size, case)
    _, manifest = described(runs, case)
    batch = held_out_images(runs, case)
    assert len(batch.index) == len(manifest.val) - 2 * (case == UNEVEN)
    model, pixels = (
        build(state["extra"]["model_config"]),
        ModelInput(state["extra"]["model_config"], torch.device("cpu")),
    )
    model.load_state_dict(weights)
    targets = batch.labels
    with torch.no_grad():
        logits = model.eval()(pixels(batch.images))
    assert state["metrics"]["val/loss"] == pytest.approx(functional.cross_entropy(logits, targets).item(), rel=1e-5)
    assert state["metrics"]["val/accuracy"] == pytest.approx((logits.argmax(1) == targets).double().mean().item())
    assert state["metrics"]["val/top5"] == 1.0  # of 3 classes

    rows = predictions(runs, world_size, case)
    assert sorted(row["key"] for row in rows) == sorted(manifest.keys[index] for index in batch.index)
    right = sum(row["label"] == row["prediction"] for row in rows) / len(rows)
    assert right == pytest.approx(state["metrics"]["val/accuracy"])
    assert all(row["key"].startswith(f"{row['label']}/") and 1 / 3 <= float(row["probability"]) <= 1 for row in rows)


def predictions(runs: Path, world_size: int, case: int) -> list[dict[str, str]]:
    folder = runs / f"world-{world_size}" / f"case-{case}"
    files = [folder / f"rank-{rank}.csv" for rank in range(world_size)]
    return [row for file in files for row in csv.DictReader(file.read_text().splitlines())]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", [UNEVEN, STRAIGHT])
def test_mistakes_of_all_ranks_are_in_one_table(runs: Path, world_size: int, case: int) -> None:
    first, *others = (dict(rank["tables"]) for rank in ranks_of(runs, world_size, case))
    shown = first["val_mistakes"]
    wrong = [row for row in predictions(runs, world_size, case) if row["label"] != row["prediction"]]
    wrong.sort(key=lambda row: -float(row["probability"]))
    assert not any("val_mistakes" in tables for tables in others)
    assert [score for *_, score in shown] == [pytest.approx(float(row["probability"]), 1e-4) for row in wrong[:24]]
    assert Counter((label, said) for label, said, _ in shown) == Counter((r["label"], r["prediction"]) for r in wrong)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_run_that_stopped_in_mid_epoch_goes_on_exactly_where_it_was(runs: Path, world_size: int) -> None:
    """Bit-equal weights and metrics, augmentation and all, and every image once an epoch."""
    straight, _ = checkpoint_of(runs, world_size, STRAIGHT)
    resumed, _ = checkpoint_of(runs, world_size, GOES_ON)
    stopped, went_on = ranks_of(runs, world_size, STOPPED), ranks_of(runs, world_size, GOES_ON)
    assert all(torch.equal(weight, resumed[name]) for name, weight in straight.items())
    for rank, whole in enumerate(ranks_of(runs, world_size, STRAIGHT)):
        assert 0 < len(stopped[rank]["images"]) < len(whole["images"])
        assert stopped[rank]["images"] + went_on[rank]["images"] == whole["images"]
        assert stopped[rank]["progressed"] + went_on[rank]["progressed"] == whole["progressed"]
        assert numbers(stopped[rank]) + numbers(went_on[rank]) == numbers(whole)


def test_a_run_that_goes_on_with_more_ranks_takes_what_is_left_of_the_epoch(runs: Path) -> None:
    settings, manifest = described(runs, STRAIGHT)
    ranks = [*ranks_of(runs, 2, STOPPED), *ranks_of(runs, 3, WITH_OTHERS)]
    taken = Counter(index for rank in ranks for index in itertools.chain(*rank["images"]))
    assert {*taken} == {*manifest.train} and min(taken.values()) == settings.epochs
    assert sum(taken.values()) < settings.epochs * (len(manifest.train) + 3)


def numbers(rank: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What was logged, without the rates, and the accuracy of an epoch, which counts since a resume."""
    return [
        (
            {name: value for name, value in entry["values"].items() if name not in ("samples_per_s", "train/accuracy")},
            entry["step"],
            entry["epoch"],
        )
        for entry in rank["logged"]
    ]


def logged(rank: dict[str, Any], name: str) -> list[float]:
    return [entry["values"][name] for entry in rank["logged"] if name in entry["values"]]


def test_every_step_is_logged_with_a_fraction_of_the_epoch(runs: Path) -> None:
    first, second = ranks_of(runs, 2, STRAIGHT)
    for rank in (first, second):
        steps = [entry for entry in rank["logged"] if "train/loss" in entry["values"]]
        assert [entry["step"] for entry in steps] == [*range(1, 13)]
        assert [entry["epoch"] for entry in steps] == pytest.approx(
            [epoch + min(1, step * 6 / 21) for epoch in range(3) for step in range(1, 5)]  # of 21 images, 6 a step
        )
        assert all(set(step["values"]) == {"train/loss", "train/correct", "train/learning_rate"} for step in steps)
    names = {"train/accuracy", "val/loss", "val/accuracy", "val/top5", "samples", "samples_per_s"}
    n_images = len(described(runs, STRAIGHT)[1].train)
    assert logged(first, "samples") == [n_images, 2 * n_images, 3 * n_images] and not logged(second, "samples")
    assert [entry["epoch"] for entry in first["logged"] if set(entry["values"]) == names] == [1, 2, 3]
    assert not logged(second, "val/loss")


def test_accuracy_of_an_epoch_is_that_of_all_images_of_all_ranks(runs: Path) -> None:
    ranks = ranks_of(runs, 2, STRAIGHT)
    sizes = [[len(index) for index in rank["images"][:4]] for rank in ranks]
    correct = sum(
        share * size
        for rank, of_rank in zip(ranks, sizes, strict=True)
        for share, size in zip(logged(rank, "train/correct")[:4], of_rank, strict=True)
    )
    assert logged(ranks[0], "train/accuracy")[0] == pytest.approx(correct / sum(map(sum, sizes)))


def test_validation_reports_the_progress_again_as_a_sign_of_life(runs: Path) -> None:
    for rank in ranks_of(runs, 2, STRAIGHT):
        progressed = [done for done, *_ in rank["progressed"]]
        assert len(progressed) > len({*progressed})


def test_progress_ends_at_the_total(runs: Path) -> None:
    for rank in ranks_of(runs, 3, UNEVEN):
        done, total, unit = rank["progressed"][-1]
        assert (done, unit) == (total, "images")


def test_rank_0_makes_pictures_of_examples_with_what_they_are_taken_for(runs: Path) -> None:
    first, second = ranks_of(runs, 2, STRAIGHT)
    assert [step for step, _, _ in first["pictures"]] == [1, 5, 9]
    step, shape, caption = first["pictures"][0]
    assert shape == [3, 8, 8 * len(first["images"][step - 1])]
    assert len(caption.split(", ")) == len(first["images"][step - 1])
    assert all(said.split(":")[0] in COLOURS for said in caption.split(", "))
    assert second["pictures"] == []


def test_every_fourth_batch_of_the_last_epoch_and_the_first_is_in_the_table_of_what_was_trained_on(runs: Path) -> None:
    for rank in ranks_of(runs, 2, STRAIGHT):
        assert len(rank["images"]) == 12  # 3 epochs of 4 steps
        tables = [(name, len(rows)) for name, rows in rank["tables"] if name != "val_mistakes"]
        assert tables == [("train_predictions", len(rank["images"][-4]))]


def test_label_map_keeps_the_head_and_trains_and_validates_the_mapped_outputs(runs: Path) -> None:
    """With next to no learning rate the score is that of the weights that were given."""
    _, state = checkpoint_of(runs, 2, MAPPED)
    config = state["extra"]["model_config"]
    assert (config["n_outputs"], config["output_names"]) == (len(LABELS), LABELS)
    assert dict(zip(config["classes"], config["outputs"], strict=True)) == {"blue": 1, "green": 4, "red": 2}
    weights, _ = checkpoint_of(runs, 2, MAPPED)
    torch.testing.assert_close(weights["head.weight"], load_file(runs / "five.safetensors")["head.weight"])

    folder = runs / "world-2" / f"case-{MAPPED}"
    rows = [row for rank in range(2) for row in csv.DictReader((folder / f"rank-{rank}.csv").read_text().splitlines())]
    assert {row["label"] for row in rows} == set(COLOURS)
    assert {row["prediction"] for row in rows} <= set(LABELS)
    right = sum(row["label"] == row["prediction"] for row in rows) / len(rows)
    assert right == pytest.approx(state["metrics"]["val/accuracy"])


def test_more_bad_images_than_are_allowed_end_the_run_with_their_names(runs: Path) -> None:
    _, manifest = described(runs, UNEVEN)
    for rank in ranks_of(runs, 2, FULL_OF_BAD):
        assert rank["failure"].startswith("TooManyBadImages: 2 of 30 images")
        assert all(manifest.keys[index] in rank["failure"] for index in manifest.val[:2])


def test_single_image_is_trained_on_where_batch_norm_needs_two(runs: Path) -> None:
    _, state = checkpoint_of(runs, 1, SINGLES)
    assert state["step"] == 2 * len(described(runs, SINGLES)[1].train)


def test_rank_0_says_a_line_an_epoch_and_what_it_goes_on_from(runs: Path) -> None:
    said = (runs / "output-0.txt").read_text()
    assert "training small_cnn, 23,891 parameters, on 21 images, 7 steps an epoch over 1 rank" in said
    assert "continuing after step 3 in epoch 1" in said
    assert said.count("epoch 3/3: train/loss ") == 2 * len(WORLD_SIZES) + 1


def test_checkpoint_tells_the_size_of_images_that_a_run_with_changes_has_gone_on_with(runs: Path) -> None:
    state = torch.load(runs / f"world-2/case-{STOPPED}/checkpoint/state.pt", weights_only=True)
    before, manifest = state["extra"]["model_config"], Manifest.read(runs / "whole-inputs")
    assert before["image_size"] == 8
    assert described_again(before, manifest, 16) == {**before, "image_size": 16}
    with pytest.raises(
        UsageError, match=r"the checkpoint is of 1 class \(red\), the images are of 3 classes \(blue, green, red\)"
    ):
        described_again({**before, "classes": ["red"]}, manifest, 8)
