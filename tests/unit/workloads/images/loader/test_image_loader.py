import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ddptrain.storage.store import Location, StoreUnreachable
from ddptrain.workloads.images.data.manifest import Manifest
from ddptrain.workloads.images.loader import image_loader
from ddptrain.workloads.images.loader.bad_images import TooManyBadImages, check_bad
from ddptrain.workloads.images.loader.batcher import Batch
from ddptrain.workloads.images.loader.decode import decode_eval
from ddptrain.workloads.images.loader.image_loader import ImageLoader
from ddptrain.workloads.images.params import ImagesParams
from tests.servers.images_on_s3 import draw, draw_folder

CPU = torch.device("cpu")
CLASSES = ("beagle", "chow", "pug")
PER_CLASS = 14
SIZE = 16
Told = list[str]


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
    return Manifest(
        url=str(folder),
        classes=CLASSES,
        keys=tuple(keys),
        labels=tuple(CLASSES.index(key.partition("/")[0]) for key in keys),
        sizes=(-1,) * n,
        versions=("",) * n,
        train=tuple(index for index in range(n) if index % 4),
        val=tuple(range(0, n, 4)),
    )


@contextmanager
def feeder(
    folder: Path, rank: int = 0, world_size: int = 1, told: Told | None = None, deadline_s: float = 60, **params: Any
) -> Iterator[ImageLoader]:
    defaults = {"image_size": SIZE, "batch_size": 5, "loader_workers": 0, "epochs": 3, "requests": 4, "seed": 7}
    settings = ImagesParams.model_validate(defaults | params)
    tell = (told if told is not None else []).append
    manifest, location = manifest_of(folder), Location(str(folder))
    with ImageLoader(manifest, location, settings, CPU, rank, world_size, tell, deadline_s=deadline_s) as made:
        yield made


def seen(batches: Iterator[Batch]) -> dict[int, tuple[int, bytes]]:
    """Image -> its label and pixels; each batch is checked."""
    found = {}
    for batch in batches:
        assert batch.images.dtype == torch.uint8 and batch.images.shape[1:] == (3, SIZE, SIZE)
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        for row in range(batch.n_counted):
            assert int(batch.index[row]) not in found
            found[int(batch.index[row])] = (int(batch.labels[row]), batch.images[row].numpy().tobytes())
    return found


def test_every_image_comes_once_with_its_label_and_pixels(drawn: Path) -> None:
    manifest = manifest_of(drawn)
    with feeder(drawn) as fed:
        trained, validated = seen(fed.train(1)), seen(fed.validate())
    assert sorted(trained) == list(manifest.train) and list(validated) == list(manifest.val)
    with feeder(drawn) as fed:  # an evaluation validates only
        assert seen(fed.validate()) == validated
    for index, (label, pixels) in (trained | validated).items():
        assert label == manifest.labels[index]
        if index in validated:
            assert pixels == decode_eval((drawn / manifest.keys[index]).read_bytes(), SIZE).tobytes()


def test_pixels_hang_on_seed_epoch_and_image_alone(drawn: Path) -> None:
    with feeder(drawn) as fed:
        first, second = seen(fed.train(1)), seen(fed.train(2))
        again = seen(fed.train(1))
    assert first == again
    assert all(first[index] != second[index] for index in first)
    with feeder(drawn, seed=8) as fed:
        other = seen(fed.train(1))
    assert all(first[index] != other[index] for index in first)
    ranks: dict[int, tuple[int, bytes]] = {}
    for rank in range(2):
        with feeder(drawn, rank, 2, batch_size=3, loader_workers=1 + rank) as fed:
            ranks |= seen(fed.train(1))
    assert ranks == first


def test_batches_are_the_same_with_any_number_of_processes(drawn: Path) -> None:
    orders = []
    for workers in (0, 2):
        with feeder(drawn, loader_workers=workers) as fed:
            orders.append([batch.index.tolist() for batch in fed.train(1)])
    assert orders[0] == orders[1]


def test_epoch_goes_on_where_it_was_left(drawn: Path) -> None:
    with feeder(drawn) as fed:
        whole = [batch.index.tolist() for batch in fed.train(1)]
        assert fed.steps(1) == len(whole) == 7
        assert [batch.index.tolist() for batch in fed.train(1, first=3)] == whole[3:]
        rest = seen(fed.train(1, taken=[[1, 3]]))
        assert fed.steps(1, [[1, 3]]) == 4
    assert sorted(rest) == sorted(index for batch in whole[3:] for index in batch)


def test_rank_without_an_image_in_a_step_gets_one_row_that_does_not_count(drawn: Path) -> None:
    steps = []
    for rank in range(40):
        if rank in (0, 39):
            with feeder(drawn, rank, 40, batch_size=1) as fed:
                steps.append([*fed.train(1), *fed.validate()])
    (trained, validated), (none, nothing) = steps
    assert (trained.n_counted, trained.total, validated.n_counted, validated.total) == (1, 31, 1, 11)
    assert (none.n_counted, none.total, nothing.n_counted, nothing.total) == (0, 31, 0, 11)
    assert none.images.shape == (1, 3, SIZE, SIZE) and len(none.labels) == len(none.index) == len(none.ok) == 1
    assert not none.ok.any() and not none.images.any()


def test_batches_that_nobody_wants_any_more_are_dropped(drawn: Path) -> None:
    with feeder(drawn, loader_workers=1) as fed:
        expected = seen(fed.train(1))
        for _ in range(20):
            batches = fed.train(2)
            next(batches)
            batches.close()  # type: ignore[attr-defined]
        left = fed.train(3)
        next(left)
        assert seen(fed.train(1)) == expected
        assert len(seen(fed.validate())) == 11


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_image_is_named_once_and_another_of_its_class_stands_in(images: Path, workers: int) -> None:
    manifest = manifest_of(images)
    gone, torn, unseen = manifest.train[3], manifest.train[20], manifest.val[2]
    (images / manifest.keys[gone]).unlink()
    for index in (torn, unseen):
        data = (images / manifest.keys[index]).read_bytes()
        (images / manifest.keys[index]).unlink()
        (images / manifest.keys[index]).write_bytes(data[:-100])
    told: Told = []
    with feeder(images, told=told, loader_workers=workers, max_bad_fraction=0.1) as fed:
        epochs = [[*fed.train(epoch)] for epoch in (1, 1, 2)]
        validations = [[*fed.validate()] for _ in range(2)]
        bad = dict(fed.bad)
        assert sorted(fed.bad_index) == sorted([gone, torn, unseen])
    assert bad[manifest.keys[gone]] == "it is no longer there"
    assert "truncated" in bad[manifest.keys[torn]]
    assert sorted(told) == sorted(f"bad image {key}: {reason}" for key, reason in bad.items()), "each once"
    for batches in epochs:
        shown = torch.cat([batch.index for batch in batches]).tolist()
        ok = torch.cat([batch.ok for batch in batches]).tolist()
        labels = torch.cat([batch.labels for batch in batches]).tolist()
        assert len(shown) == 31 and not {gone, torn} & set(shown)
        stand_ins = [index for index, is_ok in zip(shown, ok, strict=True) if not is_ok]
        assert sorted(manifest.labels[index] for index in stand_ins) == [manifest.labels[gone], manifest.labels[torn]]
        assert labels == [manifest.labels[index] for index in shown]
    first, again = ([batch.index.tolist() for batch in batches] for batches in epochs[:2])
    assert first == again, "the same image stands in, also once it is known that it has to"
    for batches in validations:
        ok_of = {int(i): bool(ok) for batch in batches for i, ok in zip(batch.index, batch.ok, strict=True)}
        assert ok_of == {index: index != unseen for index in manifest.val}
        assert all(not batch.images[~batch.ok].any() and batch.images[batch.ok].any() for batch in batches)


def test_too_many_bad_images_end_the_run_with_their_names(images: Path) -> None:
    manifest = manifest_of(images)
    for index in manifest.train[:4]:
        (images / manifest.keys[index]).unlink()
    with feeder(images, max_bad_fraction=0.05) as fed:
        with pytest.raises(TooManyBadImages, match=r"3 of 42 images could not be read.*max_bad_fraction 0\.05") as told:
            for _ in fed.train(1):  # until then others stand in for those that are bad
                pass
        assert str(told.value).count("it is no longer there") == 3
        with pytest.raises(TooManyBadImages):
            next(fed.validate())


def test_folder_that_goes_away_ends_the_training_and_no_image_is_taken_for_a_bad_one(images: Path) -> None:
    told: Told = []
    with feeder(images, told=told, deadline_s=0.5, requests=1, batch_size=2) as fed:
        next(fed.train(1))
        elsewhere = images.rename(images.with_name("elsewhere"))
        with pytest.raises(StoreUnreachable) as caught:
            seen(fed.train(2))
        elsewhere.rename(images)
        assert fed.bad == [] and told == []
    said = str(caught.value)
    assert said.startswith(f"{images} does not answer: no request has succeeded since ") and "\n" not in said
    assert f"the last error: the folder {images} does not exist on " in said
    assert said.endswith("; when it is back, failure.max_restarts or --resume continues from the newest checkpoint")


def test_class_without_any_good_image_is_an_error_that_names_it(images: Path) -> None:
    for path in (images / "chow").iterdir():
        path.unlink()
    message = "no image of class chow could be read"
    with feeder(images, max_bad_fraction=1.0) as fed, pytest.raises(TooManyBadImages, match=message):
        seen(fed.train(1))


def test_bad_images_of_all_ranks_are_judged_by_their_share() -> None:
    named = {f"a/{number}.jpg": "gone" for number in range(30)}
    check_bad(30, 3000, 0.01, named)
    with pytest.raises(TooManyBadImages) as told:
        check_bad(31, 3000, 0.01, named)
    assert str(told.value).startswith("31 of 3,000 images could not be read")
    assert "a/19.jpg: gone" in str(told.value) and "a/20.jpg" not in str(told.value)
    assert str(told.value).endswith("and 11 more")


def test_names_of_bad_images_can_not_forge_lines_of_the_log() -> None:
    with pytest.raises(TooManyBadImages) as caught:
        check_bad(1, 2, 0.0, {"a/\n\x1b[31mall is well.jpg": "gone\rfine"})
    assert "a/\\u000a\\u001b[31mall is well.jpg: gone\\u000dfine" in str(caught.value)


def test_signals_of_the_group_do_not_end_decode_processes(drawn: Path) -> None:
    with feeder(drawn, loader_workers=1) as fed:
        (pid,) = fed._pool.pids  # type: ignore[union-attr]
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(pid, number)  # perhaps before it has imported anything
        next(fed.train(1))
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(pid, number)
        assert len(seen(fed.train(1))) == 31
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def test_secrets_are_not_in_the_command_of_a_decode_process(drawn: Path) -> None:
    secret = {"secret": "hidden-from-ps"}
    settings = ImagesParams.model_validate({"image_size": SIZE, "loader_workers": 1})
    with ImageLoader(manifest_of(drawn), Location(str(drawn), secret), settings, CPU, 0, 1, print) as fed:
        next(fed.train(1))
        process = psutil.Process(fed._pool.pids[0])  # type: ignore[union-attr]
        assert "hidden-from-ps" not in json.dumps([process.cmdline(), process.environ()])


@pytest.mark.parametrize(
    ("cores", "local", "device", "expected"),
    [(16, 1, "cuda", 15), (16, 8, "cuda", 1), (2, 2, "cpu", 1), (64, 2, "cpu", 8)],
)
def test_auto_leaves_cores_to_the_rank(
    cores: int, local: int, device: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    assert image_loader.loader_workers("auto", torch.device(device)) == expected
    assert image_loader.loader_workers(3, torch.device(device)) == 3


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_images_to_validate_with_are_read_from_their_own_folder(tmp_path: Path, loader_workers: int) -> None:
    source, held = tmp_path / "source", tmp_path / "held"
    keys = draw_folder(source, CLASSES, 2, (24, 20))
    for key in keys:  # the same names as in training, other pixels
        (held / key).parent.mkdir(parents=True, exist_ok=True)
        (held / key).write_bytes(draw((24, 20), f"held {key}"))
    (held / keys[0]).unlink()
    n = len(keys)
    labels = tuple(CLASSES.index(key.partition("/")[0]) for key in keys)
    manifest = Manifest(
        url=str(source),
        val_url=str(held),
        classes=CLASSES,
        keys=keys * 2,
        labels=labels * 2,
        sizes=(-1,) * 2 * n,
        versions=("",) * 2 * n,
        train=tuple(range(n)),
        val=tuple(range(n, 2 * n)),
    )
    settings = ImagesParams(
        source=str(source),
        val_source=str(held),
        image_size=SIZE,
        batch_size=4,
        loader_workers=loader_workers,
        augmentation="none",
        max_bad_fraction=0.5,
    )
    told: Told = []
    with ImageLoader(manifest, manifest.location(settings), settings, CPU, 0, 1, told.append) as fed:
        trained, validated = seen(fed.train(1)), seen(fed.validate())
    assert sorted(trained) == list(manifest.train)
    assert sorted(validated) == list(manifest.val)
    del validated[n]  # the one that is missing, which counts for nothing
    for folder, found in ((source, trained), (held, validated)):
        for index, (label, pixels) in found.items():
            key = keys[index % n]
            assert label == CLASSES.index(key.partition("/")[0])
            assert pixels == decode_eval((folder / key).read_bytes(), SIZE).tobytes()
    assert told == [f"bad image {held}/{keys[0]}: it is no longer there"]
