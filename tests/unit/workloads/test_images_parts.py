"""Parts of the image workload: addresses, a dataset, parameters, and validation."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import DataLoader

from ddptrain.errors import UsageError
from ddptrain.storage.object_store import settings_for
from ddptrain.storage.sources import open_source
from ddptrain.storage.store import Location, NotFound, StoreUnreachable
from ddptrain.workloads.images.dataset import ImageFolder, UnreadableImage
from ddptrain.workloads.images.reader import SHAPES, SyntheticImages
from tests.servers.images_on_s3 import draw_folder

# --- Addresses of stores that can't be right, or lead nowhere ---


@pytest.mark.parametrize("url", ["s3://me:hush@box/x", "gs://hush@box", "abfs://me:hush@acc/dogs"])
def test_credentials_in_an_address_are_refused_before_they_are_sent_anywhere(url: str) -> None:
    with pytest.raises(UsageError, match=r"<left out>@.* contains credentials.*params\.source_options") as caught:
        open_source(Location(url))
    assert "hush" not in str(caught.value)


def test_a_bucket_whose_name_is_none_has_no_region() -> None:
    bucket = "no bucket:x"
    assert (
        settings_for(Location(f"s3://{bucket}/p", {"skip_signature": True}), "s3", bucket, 1.0)[1]["region"]
        == "us-east-1"
    )


def test_a_server_that_is_down_is_no_mistake_in_the_options() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(StoreUnreachable, match=rf"ftp://<left out>@{where}/x can't be opened: .*refused"):
            open_source(Location(f"ftp://me:hush@{where}/x"))


# --- images dataset ---


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


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_data_loader_reads_whole_batches_also_in_forked_workers(folder: Path) -> None:
    data = ImageFolder(str(folder), transform=as_tensor)
    data[0]
    loader = DataLoader(data, batch_size=5, num_workers=1, multiprocessing_context="fork")
    batches = [*loader]
    assert [tuple(images.shape) for images, _ in batches] == [(5, 20, 24, 3), (5, 20, 24, 3), (2, 20, 24, 3)]
    assert torch.cat([labels for _, labels in batches]).tolist() == data.labels


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


def test_drawings_are_the_same_everywhere_and_of_every_shape() -> None:
    first, second = (SyntheticImages(Location("builtin")) for _ in range(2))
    keys = [listed.key for listed in first.listing()]
    assert {key.split("/")[0] for key in keys} == set(SHAPES)
    assert [first.get(key) for key in keys[::97]] == [second.get(key) for key in keys[::97]]
    assert len({first.get(key) for key in keys}) == len(keys) == 600
    with pytest.raises(NotFound):
        first.get("circle/../secret")
