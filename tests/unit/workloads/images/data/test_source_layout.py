"""A source that is split into train and val folders, and images to validate with that have a folder of their own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ddptrain.errors import UsageError
from ddptrain.workloads.images.listing import is_split, prepare
from ddptrain.workloads.images.manifest import FILE, Manifest


def fill(folder: Path, *names: str, each: int = 4) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(each):
            (folder / name / f"{number}.jpg").write_bytes(b"x")
    return folder


def prepared(folder: Path, source: Path, **params: Any) -> tuple[Manifest, list[str]]:
    folder.mkdir(exist_ok=True)
    said: list[str] = []
    prepare({"source": str(source), **params}, folder, said.append)
    return Manifest.read(folder), said


def keys_of(manifest: Manifest, indices: Iterable[int]) -> list[str]:
    return [manifest.keys[index] for index in indices]


# --- which sources are split ---


@pytest.mark.parametrize(
    ("folders", "split"),
    [
        ({"train", "val"}, True),
        ({"train", "val", "test"}, True),
        ({"cat", "dog"}, False),
        ({"train", "bus", "car"}, False),
        ({"train"}, False),
        ({"val"}, False),
        ({"val", "test"}, False),
    ],
)
def test_a_source_is_split_if_its_folders_are_train_and_val(folders: set[str], split: bool) -> None:
    assert is_split(folders, "SRC") is split


@pytest.mark.parametrize(
    "folders",
    [{"train", "valid"}, {"train", "test"}, {"Train", "Val"}, {"train", "val", "extra"}, {"train", "val", "valid"}],
)
def test_a_source_that_is_split_in_another_way_is_refused_with_what_to_write(folders: set[str]) -> None:
    with pytest.raises(UsageError, match=r"SRC has the folders .* train and val with"):
        is_split(folders, "SRC")


# --- the list that is made of them ---


def test_train_trains_val_validates_and_test_is_left_alone(tmp_path: Path) -> None:
    source = fill(tmp_path / "source", "train/cat", "train/dog", "val/cat", "val/dog", "test/cat", "test/x")
    manifest, said = prepared(tmp_path / "inputs", source)
    assert manifest.classes == ("cat", "dog")
    assert keys_of(manifest, manifest.train) == [f"train/{name}/{n}.jpg" for name in ("cat", "dog") for n in range(4)]
    assert keys_of(manifest, manifest.val) == [f"val/{name}/{n}.jpg" for name in ("cat", "dog") for n in range(4)]
    assert [manifest.labels[index] for index in manifest.val] == [0] * 4 + [1] * 4
    layout = "train/ trains, val/ validates"
    assert said == [f"16 images of 2 classes in {source}: 8 to train on, 8 to validate with; {layout}"]


def test_subset_counts_for_both_parts(tmp_path: Path) -> None:
    names = [f"{part}/{name}" for part in ("train", "val") for name in ("cat", "dog", "emu")]
    source = fill(tmp_path / "source", *names)
    manifest, _ = prepared(tmp_path / "inputs", source, subset=["cat", "emu"])
    assert manifest.classes == ("cat", "emu")
    assert (len(manifest.train), len(manifest.val)) == (8, 8)
    assert not any("dog" in key for key in manifest.keys)


@pytest.mark.parametrize(
    ("folders", "complaint"),
    [
        (["train/cat", "train/dog", "val/cat"], r"source/val, .* has no images of dog"),
        (
            ["train/cat", "train/dog", "val/cat", "val/Dog"],
            r"source/val, .* not classes of the training data: Dog",
        ),
        (
            ["train/cat", "val/cat"],
            r"source/train gives 1 class only, cat: at least 2 are needed; params.source must be",
        ),
        (["train/cat", "train/dog", "val"], r"source/val has its 4 images directly in it, not in class folders"),
    ],
)
def test_folders_that_do_not_agree_end_it_before_anything_starts(
    tmp_path: Path, folders: list[str], complaint: str
) -> None:
    source = fill(tmp_path / "source", *folders)
    with pytest.raises(UsageError, match=complaint) as caught:
        prepared(tmp_path / "inputs", source)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "inputs" / FILE).exists()


def test_a_validation_folder_without_an_image_is_not_passed_over(tmp_path: Path) -> None:
    source = fill(tmp_path / "source", "train/cat", "train/dog")
    (source / "val" / "cat").mkdir(parents=True)
    with pytest.raises(UsageError, match="source/val, only 1 folder without an image"):
        prepared(tmp_path / "inputs", source)
