"""Sharded checkpoints become one: equal tensors, complete or not at all, in files of limited size."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from ddptrain.errors import UsageError
from ddptrain.protocol.tensor_slices import SavedTensor, saved_model, slice_metadata
from ddptrain.results.checkpoints import consolidation
from ddptrain.results.checkpoints.consolidation import consolidate, row_blocks, split_tensors
from ddptrain.results.checkpoints.run_checkpoints import CheckpointPolicy
from ddptrain.results.checkpoints.verification import verify
from ddptrain.results.errors import CheckpointDamaged
from ddptrain.results.run_writer import RunWriter

WHOLE = np.arange(40, dtype=np.float32).reshape(10, 4)
SMALL = np.array([1, 2, 3], dtype=np.float16)


def shard(tensors: dict[str, Any], places: dict[str, Any], tied: dict[str, str] | None = None) -> bytes:
    data: bytes = save(tensors, slice_metadata(places, tied or {}))
    return data


@pytest.fixture
def checkpoint(writer: RunWriter, stage: Callable[..., Any]) -> Path:
    """A checkpoint of two ranks."""
    first = shard({"w": WHOLE[:6], "small": SMALL}, {"w": ((10, 4), (0, 0)), "small": ((3,), (0,))}, {"same": "small"})
    second = shard({"w": WHOLE[6:].copy()}, {"w": ((10, 4), (6, 0))})
    contents = {"model.rank-0.safetensors": first, "model.rank-1.safetensors": second, "state.pt": b"state"}
    event, folder = stage(5, {"val/loss": 1.5}, {**contents, "optimizer.rank-0.safetensors": b"much"})
    return writer.adopt_checkpoint(0, event, folder, CheckpointPolicy())


def test_one_file_has_all_tensors_and_the_names_of_shared_ones(checkpoint: Path, tmp_path: Path) -> None:
    done = consolidate(checkpoint, tmp_path / "out", more=[checkpoint.parent.parent / "run.json"])
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint.json", "model.safetensors", "run.json", "state.pt"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert np.array_equal(found["w"], WHOLE) and np.array_equal(found["small"], SMALL) and len(found) == 2
    assert saved_model(tmp_path / "out")[1] == {"same": "small"}
    assert (done.step, done.tensors, done.n_bytes) == (5, 2, 40 * 4 + 3 * 2)
    verified = verify(tmp_path / "out")
    assert (verified.step, verified.metrics) == (5, {"val/loss": 1.5})
    assert (tmp_path / "out" / "state.pt").read_bytes() == b"state"


def test_large_models_have_several_files_and_an_index(checkpoint: Path, tmp_path: Path) -> None:
    done = consolidate(checkpoint, tmp_path / "out", max_file_bytes=161)
    assert done.files[:3] == (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    second = "model-00002-of-00002.safetensors"
    assert index["weight_map"] == {"w": "model-00001-of-00002.safetensors", "small": second, "same": second}
    assert index["metadata"] == {"total_size": 166}
    tensors, tied = saved_model(tmp_path / "out")
    assert np.array_equal(tensors["w"].read().view(np.float32), WHOLE) and tied == {"same": "small"}
    verify(tmp_path / "out")


def test_tensors_are_copied_in_blocks_of_rows(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consolidation, "_CHUNK_BYTES", 50)  # three rows of 16 bytes
    consolidate(checkpoint, tmp_path / "out")
    assert np.array_equal(load_file(tmp_path / "out" / "model.safetensors")["w"], WHOLE)
    blocks = list(row_blocks(SavedTensor("F32", (10, 4), ())))
    assert blocks == [((0, 0), (3, 4)), ((3, 0), (3, 4)), ((6, 0), (3, 4)), ((9, 0), (1, 4))]
    assert list(row_blocks(SavedTensor("F32", (2, 99), ()))) == [((0, 0), (1, 99)), ((1, 0), (1, 99))]
    assert list(row_blocks(SavedTensor("F32", (), ()))) == [((), ())]
    assert list(row_blocks(SavedTensor("F32", (0, 4), ()))) == []


def test_a_tensor_above_the_limit_has_a_file_of_its_own() -> None:
    tensors = {name: SavedTensor("U8", (size,), ()) for name, size in {"a": 3, "b": 20, "c": 4, "d": 6}.items()}
    assert split_tensors(tensors, 10) == [["a"], ["b"], ["c", "d"]]


def test_damaged_checkpoint_is_named_and_nothing_is_written(checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "model.rank-1.safetensors"
    os.chmod(file, 0o644)
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[:-1] + b"\xff")
    with pytest.raises(CheckpointDamaged, match=r"SHA-256 of model\.rank-1\.safetensors"):
        consolidate(checkpoint, tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_folder_that_exists_is_not_touched(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists: choose a new folder"):
        consolidate(checkpoint, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="can't write the checkpoint to"):
        consolidate(checkpoint, tmp_path / "file" / "out")


def test_failed_write_leaves_nothing(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(consolidation, "publish", full)
    with pytest.raises(UsageError, match="No space left on device"):
        consolidate(checkpoint, tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
