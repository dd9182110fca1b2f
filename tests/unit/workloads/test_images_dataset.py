from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader

from ddptrain.errors import UsageError
from ddptrain.workloads.images.dataset import ImageFolder, UnreadableImage
from tests.servers.images_on_s3 import draw_folder

CLASSES = ("beagle", "chow", "pug")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve images; never changed."""
    made = tmp_path_factory.mktemp("images")
    draw_folder(made, CLASSES, 4, (24, 20))
    return made


def as_array(image: Any) -> NDArray[np.uint8]:
    return np.asarray(image)


def as_tensor(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image))


def test_images_come_in_the_order_of_classes_and_keys(folder: Path) -> None:
    data = ImageFolder(str(folder), transform=as_array, target_transform=lambda label: label * 10)
    assert len(data) == 12 and data.classes == [*CLASSES] and data.class_to_idx["pug"] == 2
    assert data.keys == sorted(data.keys) and data.labels == [0] * 4 + [1] * 4 + [2] * 4
    image, label = data[5]
    assert label == 10
    with Image.open(folder / data.keys[5]) as expected:
        assert np.array_equal(image, np.asarray(expected))


def test_batch_has_the_order_that_was_asked_for(folder: Path) -> None:
    data = ImageFolder(str(folder), transform=as_array)
    order = [7, 0, 11, 3, 3]
    for (image, label), index in zip(data.__getitems__(order), order, strict=True):
        assert label == data.labels[index] and np.array_equal(image, data[index][0])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_data_loader_reads_whole_batches_also_in_forked_workers(folder: Path) -> None:
    data = ImageFolder(str(folder), transform=as_tensor)
    data[0]
    loader = DataLoader(data, batch_size=5, num_workers=1, multiprocessing_context="fork")
    batches = [*loader]
    assert [tuple(images.shape) for images, _ in batches] == [(5, 20, 24, 3), (5, 20, 24, 3), (2, 20, 24, 3)]
    assert torch.cat([labels for _, labels in batches]).tolist() == data.labels


def test_cache_serves_what_was_read_before(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "images"
    draw_folder(source, CLASSES, 2, (24, 20))
    data = ImageFolder(str(source), transform=as_array, cache_dir=tmp_path / "cache")
    first = data.__getitems__(range(6))
    for path in source.rglob("*.jpg"):
        path.unlink()
    for (image, label), (again, label_again) in zip(first, data.__getitems__(range(6)), strict=True):
        assert label == label_again and np.array_equal(image, again)


def test_image_that_can_t_be_had_is_an_error_that_names_it(tmp_path: Path) -> None:
    draw_folder(tmp_path, CLASSES, 1, (24, 20))
    data = ImageFolder(str(tmp_path), deadline_s=1)
    (tmp_path / data.keys[0]).unlink()
    (tmp_path / data.keys[1]).write_bytes(b"x" * (tmp_path / data.keys[1]).stat().st_size)
    with pytest.raises(UnreadableImage, match=rf"{data.keys[0]}: it is no longer there"):
        data[0]
    with pytest.raises(UnreadableImage, match=rf"{data.keys[1]}: cannot identify image"):
        data.__getitems__([2, 1])


def test_folder_without_images_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        ImageFolder(str(tmp_path))


def test_s3_image_folder_keeps_its_files_classes_and_transforms() -> None:
    theirs: Any = SimpleNamespace(
        s3_bucket="bucket",
        anon=True,
        all_files=["dogs/pug/2.jpg", "dogs/chow/1.jpg"],
        classes=["chow", "pug"],
        class_to_idx={"chow": 0, "pug": 1},
        transform=as_array,
        target_transform=None,
        _get_class=lambda key: key.split("/")[-2],
    )
    ours = ImageFolder.of(theirs)
    assert (ours.keys, ours.labels, ours.classes) == (theirs.all_files, [1, 0], theirs.classes)
    assert ours.transform is as_array
    assert (ours.location.url, ours.location.options) == ("s3://bucket", {"skip_signature": True})
