"""Saved tensors in slices: what is read from which files, and which files are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ddptrain.protocol.tensor_slices import (
    INDEX_FILE,
    MODEL,
    Place,
    SavedTensor,
    SlicesError,
    is_sharded_checkpoint,
    read_shards,
    saved_model,
    shard_file,
    slice_metadata,
)

WHOLE = np.arange(30, dtype=np.float32).reshape(5, 6)


def write(folder: Path, rank: int, slices: Mapping[str, tuple[Any, Place]], tied: Mapping[str, str] = {}) -> None:
    places = {name: place for name, (_, place) in slices.items()}
    arrays = {name: np.array(array, order="C") for name, (array, _) in slices.items()}
    save_file(arrays, folder / shard_file(MODEL, rank), slice_metadata(places, tied))


def floats(tensor: SavedTensor, *part: tuple[int, ...]) -> Any:
    return tensor.read(*part).view(np.float32)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Rows 0 to 2 are of rank 0, rows 3 and 4 of rank 1."""
    write(tmp_path, 0, {"w": (WHOLE[:3], ((5, 6), (0, 0)))}, {"v": "w", "gone": "x"})
    write(tmp_path, 1, {"w": (WHOLE[3:], ((5, 6), (3, 0)))})
    return tmp_path


@pytest.mark.parametrize(("offset", "size"), [((0, 0), (5, 6)), ((2, 0), (2, 6)), ((1, 2), (4, 3)), ((4, 5), (1, 1))])
def test_any_part_is_put_together_from_the_slices(two: Path, offset: tuple[int, int], size: tuple[int, int]) -> None:
    tensors, tied = saved_model(two)
    rows, columns = (slice(at, at + n) for at, n in zip(offset, size, strict=True))
    assert np.array_equal(floats(tensors["w"], offset, size), WHOLE[rows, columns])
    assert tied == {"v": "w"}


def test_slices_may_be_of_other_dimensions_than_the_first(tmp_path: Path) -> None:
    write(tmp_path, 0, {"w": (WHOLE[:, :2], ((5, 6), (0, 0)))})
    write(tmp_path, 1, {"w": (WHOLE[:, 2:], ((5, 6), (0, 2)))})
    assert np.array_equal(floats(saved_model(tmp_path)[0]["w"]), WHOLE)


def test_numbers_without_dimension_and_empty_parts_are_read(tmp_path: Path) -> None:
    write(tmp_path, 0, {"one": (np.float32(7), ((), ()))})
    one = saved_model(tmp_path)[0]["one"]
    assert one.read().reshape(1).view(np.float32)[0] == 7
    write(tmp_path, 0, {"w": (WHOLE, ((5, 6), (0, 0)))})
    assert saved_model(tmp_path)[0]["w"].read((5, 0), (0, 6)).shape == (0, 6)


def test_file_of_a_model_that_is_not_sharded_is_one_slice(tmp_path: Path) -> None:
    save_file({"w": WHOLE}, tmp_path / "model.safetensors", {"v": "w"})
    tensors, tied = saved_model(tmp_path)
    assert np.array_equal(floats(tensors["w"]), WHOLE) and tied == {"v": "w"}
    assert not is_sharded_checkpoint(tmp_path)


def test_several_files_are_found_through_their_index(tmp_path: Path) -> None:
    save_file({"w": WHOLE}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": WHOLE[0]}, tmp_path / "model-00002-of-00002.safetensors")
    names = {"w": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": names}))
    assert {name: tensor.shape for name, tensor in saved_model(tmp_path)[0].items()} == {"w": (5, 6), "b": (6,)}


@pytest.mark.parametrize("name", ["../w.safetensors", "/etc/passwd", "..", ""])
def test_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(SlicesError, match="not a plain file name"):
        saved_model(tmp_path)


def test_missing_slice_is_named(two: Path) -> None:
    (two / shard_file(MODEL, 1)).unlink()
    with pytest.raises(SlicesError, match="18 of the 30 values of w are in the files of the ranks"):
        read_shards(two, MODEL)


def test_slices_that_overlap_do_not_pass_for_a_whole_tensor(tmp_path: Path) -> None:
    write(tmp_path, 0, {"w": (WHOLE[:3], ((6, 6), (0, 0)))})
    write(tmp_path, 1, {"w": (WHOLE[:3], ((6, 6), (1, 0)))})
    with pytest.raises(SlicesError, match="values at offset"):
        saved_model(tmp_path)[0]["w"].read((4, 0), (2, 6))


@pytest.mark.parametrize(
    ("shape", "offset"), [([5, 6], [3, 0]), ([5], [0]), ([5, 6], [-1, 0]), ([5, 6.0], [0, 0]), ("ab", "cd"), (5, 6)]
)
def test_slice_that_is_not_inside_of_its_tensor_is_refused(tmp_path: Path, shape: Any, offset: Any) -> None:
    write(tmp_path, 0, {"w": (WHOLE[:3], (shape, offset))})
    with pytest.raises(SlicesError, match=r"model\.rank-0\.safetensors is damaged"):
        saved_model(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x04\0\0\0\0\0\0\0{bad",
        b'\x3f\0\0\0\0\0\0\0{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}         ',
        b'\x3f\0\0\0\0\0\0\0{"w":{"dtype":"P99","shape":[0],"data_offsets":[0,0]}}          ',
    ],
)
def test_damaged_file_is_refused_with_its_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(SlicesError, match=r"model\.safetensors is damaged"):
        saved_model(tmp_path)
