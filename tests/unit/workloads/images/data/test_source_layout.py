"""A source that is split into train and val folders, and images to validate with that have a folder of their own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ddptrain.errors import UsageError
from ddptrain.storage.store import Location, StoreMissing
from ddptrain.workloads.images.data.listing import check_classes_agree, is_split, prepare
from ddptrain.workloads.images.data.manifest import FILE, Manifest
from ddptrain.workloads.images.params import ImagesParams
from tests.unit.workloads.images_runs import make_manifest


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
    with pytest.raises(UsageError, match=r"SRC has the folders .* params\.val_source, such as SRC/train and SRC/valid"):
        is_split(folders, "SRC")


@pytest.mark.parametrize(
    ("val", "complaint"),
    [
        (["cat", "cow"], "VAL, .* has folders that are not classes of the training data: cow; .* cat, dog, emu"),
        (["cat"], "VAL, .* has no images of dog: it needs some of every class"),
    ],
)
def test_classes_to_validate_with_are_those_of_training(val: list[str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        check_classes_agree({"cat", "dog", "emu"}, ["cat", "dog"], {*val}, "VAL")
    check_classes_agree({"cat", "dog", "emu"}, ["cat", "dog"], {"cat", "dog", "emu"}, "VAL")


# --- the list that is made of them ---


def test_train_trains_val_validates_and_test_is_left_alone(tmp_path: Path) -> None:
    source = fill(tmp_path / "source", "train/cat", "train/dog", "val/cat", "val/dog", "test/cat", "test/x")
    manifest, said = prepared(tmp_path / "inputs", source)
    assert manifest.classes == ("cat", "dog") and manifest.val_url == ""
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


def test_a_folder_of_its_own_validates_and_all_of_the_source_trains(tmp_path: Path) -> None:
    source, val = fill(tmp_path / "source", "cat", "dog"), fill(tmp_path / "held", "cat", "dog", each=2)
    manifest, said = prepared(tmp_path / "inputs", source, val_source=str(val))
    assert (len(manifest.train), len(manifest.val), manifest.val_url) == (8, 4, str(val))
    # The same keys as in training, in another place.
    assert keys_of(manifest, manifest.val) == ["cat/0.jpg", "cat/1.jpg", "dog/0.jpg", "dog/1.jpg"]
    assert [manifest.name(manifest.train[0]), manifest.name(manifest.val[0])] == ["cat/0.jpg", f"{val}/cat/0.jpg"]
    assert said == [f"8 images of 2 classes in {source}: 8 to train on, 4 from {val} to validate with"]
    again, said = prepared(tmp_path / "inputs", source, val_source=str(val))
    assert again.keys[:] == manifest.keys[:] and "used again" in said[0]
    manifest, said = prepared(tmp_path / "inputs", source)
    assert manifest.val_url == "" and "params.val_source was " in said[0]


def test_a_split_source_has_no_other_folder_to_validate_with(tmp_path: Path) -> None:
    source = fill(tmp_path / "source", "train/cat", "train/dog", "val/cat", "val/dog")
    held = fill(tmp_path / "held", "cat", "dog")
    with pytest.raises(UsageError, match=r"has a val/ of its own: give another folder"):
        prepared(tmp_path / "inputs", source, val_source=str(held))


def test_missing_validation_folder_names_its_own_parameter(tmp_path: Path) -> None:
    assert Location.of("s3://b", {}, "params.val_source").options_setting == "params.source_options"
    source = fill(tmp_path / "source", "cat", "dog")
    with pytest.raises(StoreMissing, match=r"/none does not exist: params\.val_source must be a folder"):
        prepared(tmp_path / "inputs", source, val_source=str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("folders", "val", "complaint"),
    [
        (["cat", "dog"], ["cat"], r"held, .* has no images of dog"),
        (["cat", "dog"], ["cat", "dog", "cow"], r"held, .* are not classes of the training data: cow"),
        (["train/cat", "train/dog", "val/cat"], [], r"source/val, .* has no images of dog"),
        (
            ["train/cat", "train/dog", "val/cat", "val/Dog"],
            [],
            r"source/val, .* not classes of the training data: Dog",
        ),
        (
            ["train/cat", "val/cat"],
            [],
            r"source/train gives 1 class only, cat: at least 2 are needed; params.source must be",
        ),
        (["train/cat", "train/dog", "val"], [], r"source/val has its 4 images directly in it, not in class folders"),
        (["cat", "dog"], ["."], r"held has its 4 images directly in it, .*: params.val_source must be a folder"),
    ],
)
def test_folders_that_do_not_agree_end_it_before_anything_starts(
    tmp_path: Path, folders: list[str], val: list[str], complaint: str
) -> None:
    source = fill(tmp_path / "source", *folders)
    params = {"val_source": str(fill(tmp_path / "held", *val))} if val else {}
    with pytest.raises(UsageError, match=complaint) as caught:
        prepared(tmp_path / "inputs", source, **params)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "inputs" / FILE).exists()


def test_a_validation_folder_without_an_image_is_not_passed_over(tmp_path: Path) -> None:
    source = fill(tmp_path / "source", "train/cat", "train/dog")
    (source / "val" / "cat").mkdir(parents=True)
    with pytest.raises(UsageError, match="source/val, only 1 folder without an image"):
        prepared(tmp_path / "inputs", source)


def test_the_folder_to_train_on_can_not_validate_as_well(tmp_path: Path) -> None:
    source = fill(tmp_path / "source", "cat", "dog")
    with pytest.raises(UsageError, match=r"params\.source, .*, is params\.val_source"):
        prepared(tmp_path / "inputs", source, val_source=f"{source}/")


def test_ranks_read_images_to_validate_with_where_the_driver_has_found_them() -> None:
    place = "s3://b/train", ("a", "b"), ["a/1", "b/1", "a/1"], [2]
    options = {"key": "k"}
    params = ImagesParams(source="s3://b/train", val_source="s3://me/val/", source_options=options)
    location = make_manifest(*place, "s3://me/val").val_location(params)
    assert location is not None and (location.url, location.options) == ("s3://me/val", options)
    location = make_manifest(*place, "/data/val").val_location(ImagesParams(val_source="val"))
    assert location is not None and location.url == "/data/val"
    assert make_manifest(*place).val_location(params) is None
