"""Images as batches of a DataLoader: the pixels, replacements for bad images, stores that do not answer."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddptrain.rank.loader import RankLoader, make_loader
from ddptrain.storage.store import StoreUnreachable
from ddptrain.workloads.images.data import (
    BadImages,
    Batch,
    Images,
    TooManyBadImages,
    loader_workers,
    train_loader,
    val_loader,
)
from ddptrain.workloads.images.decode import decode_eval
from ddptrain.workloads.images.manifest import Manifest
from ddptrain.workloads.images.params import ImagesParams
from tests.servers.images_on_s3 import draw_folder
from tests.unit.workloads.images_runs import make_manifest

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

CPU = torch.device("cpu")
CLASSES = ("beagle", "chow", "pug")
PER_CLASS = 14
SIZE = 16


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """42 images of 3 classes; never changed."""
    folder = tmp_path_factory.mktemp("images")
    draw_folder(folder, CLASSES, PER_CLASS, (24, 20))
    return folder


@pytest.fixture
def images(drawn: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    for path in drawn.rglob("*.jpg"):
        copy = tmp_path / path.relative_to(drawn)
        copy.parent.mkdir(exist_ok=True)
        os.link(path, copy)
    return tmp_path


def manifest_of(folder: Path) -> Manifest:
    """All of the images that were drawn, as they were then: every fourth validates."""
    keys = sorted(f"{name}/{name.partition('-')[0]}_{number}.jpg" for name in CLASSES for number in range(PER_CLASS))
    n = len(keys)
    return make_manifest(str(folder), CLASSES, keys, range(0, n, 4))


def params_of(folder: Path, **params: Any) -> ImagesParams:
    defaults = {"image_size": SIZE, "batch_size": 5, "loader_workers": 0, "epochs": 3, "requests": 4, "seed": 7}
    return ImagesParams.model_validate({"source": str(folder)} | defaults | params)


def context(rank: int = 0, world_size: int = 1) -> Any:
    def loader(data: Any, *, batch_size: int, **how: Any) -> RankLoader:
        return make_loader(data, batch_size, rank, world_size, CPU, shuffle=True, drop_last=False, **how)

    return SimpleNamespace(rank=rank, world_size=world_size, device=CPU, loader=loader)


def epoch(folder: Path, number: int = 1, rank: int = 0, world_size: int = 1, **params: Any) -> list[Batch]:
    batches = train_loader(context(rank, world_size), manifest_of(folder), params_of(folder, **params))
    batches.set_epoch(number)
    return [*batches]


def validation(folder: Path, **params: Any) -> list[Batch]:
    return [*val_loader(context(), manifest_of(folder), params_of(folder, **params))]


def seen(batches: Iterable[Batch]) -> dict[int, tuple[int, bytes]]:
    """Image -> its label and pixels; each batch is checked."""
    found = {}
    for batch in batches:
        assert batch.images.dtype == torch.uint8 and batch.images.shape[1:] == (3, SIZE, SIZE)
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        for index, label, image in zip(batch.index, batch.labels, batch.images, strict=True):
            found[int(index)] = (int(label), image.numpy().tobytes())
    return found


def test_every_image_comes_with_its_label_and_pixels(drawn: Path) -> None:
    manifest = manifest_of(drawn)
    trained, validated = seen(epoch(drawn)), seen(validation(drawn))
    assert sorted(trained) == list(manifest.train) and list(validated) == list(manifest.val)
    for index, (label, pixels) in (trained | validated).items():
        assert label == manifest.labels[index]
        if index in validated:
            assert pixels == decode_eval((drawn / manifest.keys[index]).read_bytes(), SIZE).tobytes()


def test_seed_epoch_and_image_alone_determine_the_pixels(drawn: Path) -> None:
    first, second, other = seen(epoch(drawn)), seen(epoch(drawn, 2)), seen(epoch(drawn, seed=8))
    assert first == seen(epoch(drawn))
    assert all(first[index] != second[index] and first[index] != other[index] for index in first)
    ranks = [seen(epoch(drawn, 1, rank, 2, batch_size=3, loader_workers=1 + rank)) for rank in range(2)]
    assert ranks[0] | ranks[1] == first


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_image_is_named_and_another_of_its_class_replaces_it(images: Path, workers: int) -> None:
    manifest = manifest_of(images)
    missing, torn, unseen = manifest.train[3], manifest.train[20], manifest.val[2]
    (images / manifest.keys[missing]).unlink()
    for index in (torn, unseen):
        data = (images / manifest.keys[index]).read_bytes()
        (images / manifest.keys[index]).unlink()
        (images / manifest.keys[index]).write_bytes(data[:-100])
    first, again = epoch(images, loader_workers=workers), epoch(images)
    assert [batch.index.tolist() for batch in first] == [batch.index.tolist() for batch in again]
    shown = [index for batch in first for index in batch.index.tolist()]
    assert len(shown) == len(manifest.train) and not {missing, torn} & {*shown}
    extra = sorted(manifest.labels[index] for index in shown if shown.count(index) > 1)
    assert {manifest.labels[missing], manifest.labels[torn]} == {*extra}
    bad = {index: reason for batch in first for index, reason in batch.bad.items()}
    assert bad[missing] == "it is no longer there" and "truncated" in bad[torn] and {*bad} == {missing, torn}
    validated = validation(images, loader_workers=workers)
    assert sorted(seen(validated)) == [index for index in manifest.val if index != unseen]
    assert [index for batch in validated for index in batch.bad] == [unseen]


def test_folder_that_is_gone_ends_the_training_and_no_image_counts_as_bad(images: Path) -> None:
    manifest, settings = manifest_of(images), params_of(images)
    data = Images(manifest, manifest.train, settings, "none", deadline_s=0.5)
    assert not data.__getitems__([(0, 1)]).bad
    elsewhere = images.rename(images.with_name("elsewhere"))
    try:
        for one in (data, Images(manifest, manifest.train, settings, "none")):  # a host that never had it does not wait
            with pytest.raises(StoreUnreachable, match=f"{images}"):
                one.__getitems__([(0, 1), (1, 1)])
    finally:
        elsewhere.rename(images)
        del data, one
        gc.collect()  # the threads of readers end with them


def test_class_without_any_good_image_is_an_error_that_names_it(images: Path) -> None:
    for path in (images / "chow").iterdir():
        path.unlink()
    with pytest.raises(TooManyBadImages, match="no image of class chow could be read"):
        epoch(images, max_bad_fraction=1.0)


def test_bad_images_are_printed_once_and_judged_by_their_share(drawn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = BadImages(manifest_of(drawn), 0.05)  # 2 of 42
    for _ in range(2):
        bad.add({0: "gone", 1: "torn\r\x1b[31m"})
    assert capsys.readouterr().out.splitlines() == [
        "bad image beagle/beagle_0.jpg: gone",
        "bad image beagle/beagle_1.jpg: torn\\u000d\\u001b[31m",
    ]
    with pytest.raises(TooManyBadImages, match=r"3 of 42 images could not be read.*max_bad_fraction 0\.05"):
        bad.add({2: "gone"})


@pytest.mark.parametrize(
    ("cores", "local", "device", "expected"),
    [(16, 1, "cuda", 15), (16, 8, "cuda", 1), (2, 2, "cpu", 2), (64, 2, "cpu", 8)],
)
def test_auto_leaves_cores_to_the_rank(
    cores: int, local: int, device: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    assert loader_workers("auto", torch.device(device)) == expected
    assert loader_workers(3, torch.device(device)) == 3
