"""Listings and lists of images."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddptrain.errors import UsageError
from ddptrain.storage.store import Listed, Location, StoreMissing
from ddptrain.workloads.images.listing import chosen_classes, list_images, prepare
from ddptrain.workloads.images.manifest import FILE, TRAIN, VAL, DamagedManifest, Manifest
from ddptrain.workloads.images.params import N_OUTPUTS, ImagesParams

# --- The list of a run's images: classes are found, chosen and split, once for all ranks ---


CLASSES = ["n02085620-Chihuahua", "n02088364-beagle", "n02099601-golden_retriever"]


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return fill(tmp_path / "source", *(f"{name}/{number}.jpg" for name in CLASSES for number in range(10)))


def prepared(folder: Path, source: Path, **params: Any) -> tuple[Manifest, list[str]]:
    folder.mkdir(exist_ok=True)
    said: list[str] = []
    prepare({"source": str(source), **params}, folder, said.append)
    return Manifest.read(folder), said


def test_the_list_holds_every_image_by_class_and_what_it_is_for(tmp_path: Path, source: Path) -> None:
    manifest, said = prepared(tmp_path / "inputs", source)
    assert manifest.classes == tuple(CLASSES)
    assert list(manifest.keys) == sorted(f"{name}/{number}.jpg" for name in CLASSES for number in range(10))
    assert all(CLASSES[label] in key for key, label in zip(manifest.keys, manifest.labels, strict=True))
    assert (len(manifest.train), len(manifest.val)) == (24, 6)
    assert said == [f"30 images of 3 classes in {source}: 24 to train on, 6 to validate with"]


def test_other_files_are_left_out_and_counted(tmp_path: Path) -> None:
    good = ["a/1.JPG", "a/x/2.jpeg", "b/3.PNG", "b/4.bmp", "b/5.gif", "b/6.webp", "b/7.tif", "b/8.tiff"]
    rest = ["a/.hidden.jpg", ".thumbs/a.jpg", "a/notes.txt", "b/labels.csv", "README", "stray.jpg"]
    manifest, said = prepared(tmp_path / "inputs", fill(tmp_path / "source", *good, *rest))
    assert sorted(manifest.keys) == sorted(good)
    assert said[0].endswith("; left out: 3 files that are not images, 2 hidden files, 1 image outside of class folders")


def test_a_list_that_is_there_is_used_again(tmp_path: Path, source: Path) -> None:
    first, _ = prepared(tmp_path / "inputs", source)
    fill(source, "n00000000-new/1.jpg")
    again, said = prepared(tmp_path / "inputs", source)
    assert list(again.keys) == list(first.keys) and "used again" in said[0]


def test_other_parameters_make_another_list_and_say_so(tmp_path: Path, source: Path) -> None:
    prepared(tmp_path / "inputs", source)
    manifest, said = prepared(tmp_path / "inputs", source, train_pct=0.5, subset=2)
    assert (len(manifest.train), len(manifest.keys)) == (10, 20)
    assert "params.subset was None and is 2, params.train_pct was 0.8 and is 0.5" in said[0]


def test_parameters_that_do_not_decide_it_leave_the_list_alone(tmp_path: Path, source: Path) -> None:
    first, _ = prepared(tmp_path / "inputs", source)
    again, said = prepared(tmp_path / "inputs", source, epochs=99, source_options={"secret": "s3cret"})
    assert list(again.keys) == list(first.keys) and "used again" in said[0]
    assert "s3cret" not in (tmp_path / "inputs" / FILE).read_text()


def test_a_damaged_list_is_not_replaced_behind_ones_back(tmp_path: Path, source: Path) -> None:
    prepared(tmp_path / "inputs", source)
    (tmp_path / "inputs" / FILE).write_text("{}")
    with pytest.raises(DamagedManifest, match="delete it"):
        prepared(tmp_path / "inputs", source)


def test_the_first_classes_or_named_ones_are_used(tmp_path: Path, source: Path) -> None:
    assert prepared(tmp_path / "a", source, subset=2)[0].classes == tuple(CLASSES[:2])
    assert prepared(tmp_path / "b", source, subset=[CLASSES[2], CLASSES[0]])[0].classes == (CLASSES[0], CLASSES[2])


@pytest.mark.parametrize(
    ("subset", "complaint"),
    [
        (4, "params.subset asks for 4 classes, and s3://x has 3"),
        (["Chihuahua"], '"Chihuahua" (did you mean n02085620-Chihuahua?)'),
        (["beagel"], '"beagel" (did you mean n02088364-beagle?)'),
        ([CLASSES[0], "zzz"], '"zzz" (there are n02085620-Chihuahua, n02088364-beagle, n02099601-golden_retriever)'),
        ([f"no-{number}" for number in range(20)], "and 12 more"),
    ],
)
def test_a_class_that_is_none_is_named_with_the_nearest(subset: int | list[str], complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        chosen_classes(CLASSES, subset, "s3://x")
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ([], "there is nothing in .*/source: the folder is empty; params.source must be a folder"),
        ([".a/1.jpg"], "there is no image in .*/source, only 1 other file"),
        (["1.jpg", "2.jpg"], "has its 2 images directly in it, not in class folders"),
        (["a/1.txt", "b/2.csv", "b/3.csv"], "there is no image in .*, only 3 other files \\(2 .csv, 1 .txt\\)"),
        (["a/1.jpg"], "gives 1 class only, a: at least 2 are needed; params.source must be a folder"),
        (["Images/a/1.jpg", "Images/b/1.jpg"], "did you mean params.source: .*/source/Images\\?"),
    ],
)
def test_a_source_that_does_not_do_is_a_clear_error(tmp_path: Path, files: list[str], complaint: str) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(UsageError, match=complaint) as caught:
        prepared(tmp_path / "inputs", fill(tmp_path / "source", *files))
    assert str(tmp_path / "source") in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "inputs" / FILE).exists()


def test_a_local_source_that_is_not_there_and_one_without_a_file_are_told_apart(tmp_path: Path) -> None:
    source = tmp_path / "source"
    with pytest.raises(StoreMissing, match=r"/source does not exist: params\.source must be a folder"):
        prepared(tmp_path / "inputs", source)
    (source / "a").mkdir(parents=True)
    (source / "b").mkdir()
    with pytest.raises(UsageError, match=r"^there is no file in .*/source, only 2 folders without an image \(a, b\); "):
        prepared(tmp_path / "inputs", source)


def test_a_name_that_is_no_text_is_left_out(tmp_path: Path) -> None:
    fill(tmp_path / "source", "a/1.jpg", "b/1.jpg")
    with open(bytes(tmp_path / "source" / "a") + b"/\xff.jpg", "wb"):
        pass
    assert list_images(Location(str(tmp_path / "source"))).n_hidden == 1


def test_labels_that_miss_a_class_end_it_before_anything_starts(tmp_path: Path, source: Path) -> None:
    labels = tmp_path / "labels.json"
    known = {number: f"other {number}" for number in range(N_OUTPUTS)} | dict(enumerate(CLASSES[:2]))
    labels.write_text(json.dumps(known))
    with pytest.raises(UsageError, match="golden_retriever"):
        prepared(tmp_path / "inputs", source, weights="DEFAULT", label_map=str(labels))
    labels.write_text(json.dumps(known | {7: CLASSES[2]}))
    manifest, _ = prepared(tmp_path / "inputs", source, weights="DEFAULT", label_map=str(labels))
    assert manifest.classes == tuple(CLASSES)


def test_weights_that_are_not_there_are_told_before_anything_starts(tmp_path: Path, source: Path) -> None:
    weights = tmp_path / "model.pth"
    with pytest.raises(UsageError, match=r"there are no weights .*model.pth: params.weights is the path of a file"):
        prepared(tmp_path / "inputs", source, weights=str(weights))
    prepared(tmp_path / "inputs", source)
    prepared(tmp_path / "inputs", source, weights=str(weights))  # a run that goes on has a checkpoint


def test_folders_without_an_image_are_told_for_they_may_have_been_meant_as_classes(tmp_path: Path) -> None:
    fill(tmp_path / "source", "a/1.jpg", "b/1.jpg", "heic/1.heic", "control\n/1.txt", ".git/1.txt")
    for name in ("empty", ".cache"):
        (tmp_path / "source" / name).mkdir()
    manifest, said = prepared(tmp_path / "inputs", tmp_path / "source")
    assert manifest.classes == ("a", "b")
    assert said[0].endswith("3 folders without an image (control\\u000a, empty, heic)")


# --- The list of a run's images: written once, read by many, believed by nobody ---


MANIFEST = Manifest.of(
    "s3://bucket/dogs",
    ("a b", "ü"),
    [
        (Listed("a b/1+%.jpg", 10, "x"), 0, TRAIN),
        (Listed("a b/2.jpg", -1, ""), 0, VAL),
        (Listed("ü/犬/3.png", 30, "z"), 1, TRAIN),
    ],
    {"source": "s3://bucket/dogs", "subset": None, "seed": 0},
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    read = Manifest.read(tmp_path)
    assert list(read.keys) == ["a b/1+%.jpg", "a b/2.jpg", "ü/犬/3.png"]
    assert (read.url, read.classes, read.made_of) == (MANIFEST.url, MANIFEST.classes, MANIFEST.made_of)
    assert (read.labels.tolist(), read.train.tolist(), read.val.tolist()) == ([0, 0, 1], [0, 2], [1])
    assert [read.image(index) for index in range(3)] == [MANIFEST.image(index) for index in range(3)]
    assert (read.image(0).size_bytes, read.image(1)) == (10, Listed("a b/2.jpg", -1, ""))
    assert len({read.image(index).version for index in range(3)}) == 3
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_an_image_costs_30_bytes_beside_its_key() -> None:
    images = [(Listed(f"a/{number:010}.jpg", 10_000, f'"{number:032x}"'), 0, TRAIN) for number in range(10_000)]
    manifest = Manifest.of("/data", ["a", "b"], images)
    tables = [manifest.rows, manifest.train, manifest.val]
    assert sum(table.nbytes for table in tables) <= 30 * 10_000
    assert sys.getsizeof(manifest.blob) < 17 * 10_000


def test_a_manifest_that_can_not_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            MANIFEST.write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(Manifest.read(tmp_path).keys) == list(MANIFEST.keys)
    assert os.listdir(tmp_path) == [FILE]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: m.update(schema=2), "schema: Input should be 1"),
        (lambda m: m["keys"].__setitem__(0, "a b/../../etc/passwd"), "leads out of the source"),
        (lambda m: m["keys"].__setitem__(0, "/etc/passwd"), "leads out of the source"),
        (lambda m: m["keys"].__setitem__(0, "a b//x.jpg"), "leads out of the source"),
        (lambda m: m["keys"].__setitem__(0, "a b/x\0.jpg"), "leads out of the source"),
        (lambda m: m["labels"].__setitem__(0, 2), "a label is of no class"),
        (lambda m: m["labels"].pop(), "2 labels for 3 keys"),
        (lambda m: m["classes"].reverse(), "its classes are not in order"),
        (lambda m: m.update(train=[2, 0]), "train is not a list of images in order"),
        (lambda m: m.update(val=[3]), "val is not a list of images in order"),
        (lambda m: m.update(val=[0]), "an image is in train and in val"),
    ],
)
def test_hostile_content_is_a_clear_error(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], complaint: str
) -> None:
    MANIFEST.write(tmp_path)
    content = json.loads((tmp_path / FILE).read_text(encoding="utf-8"))
    change(content)
    (tmp_path / FILE).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DamagedManifest) as caught:
        Manifest.read(tmp_path)
    assert complaint in str(caught.value)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"schema": 1}'])
def test_a_file_that_is_no_manifest_is_a_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(DamagedManifest, match="is damaged"):
        Manifest.read(tmp_path)


def test_ranks_read_a_folder_where_the_driver_has_found_it() -> None:
    manifest = dataclasses.replace(MANIFEST, url="/data/dogs")
    assert manifest.location(ImagesParams(source="dogs")).url == "/data/dogs"


def test_ranks_read_a_url_with_the_credentials_of_the_parameters() -> None:
    params = ImagesParams(source="https://me:pass@host/dogs/", source_options={"a": 1})
    location = MANIFEST.location(params)
    assert location.url == "https://me:pass@host/dogs" and location.options == {"a": 1}
    assert "pass" not in repr(location)
