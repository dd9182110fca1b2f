"""Which checkpoints are kept, and checkpoints that become one file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from ddptrain.protocol.tensor_slices import saved_model, slice_metadata
from ddptrain.results.checkpoints.consolidation import consolidate
from ddptrain.results.checkpoints.run_checkpoints import (
    CheckpointPolicy,
    Saved,
    are_finite,
    best_checkpoint,
    superseded,
)
from ddptrain.results.checkpoints.verification import verify
from ddptrain.results.errors import CheckpointDamaged
from ddptrain.results.run_record import BestRecord
from ddptrain.results.run_writer import RunWriter

# --- Which checkpoint is the best one, and which are deleted ---


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "mode", "best"),
    [
        ({1: 0.5, 2: 0.3, 3: 0.4}, "min", (0.3, 2)),
        ({1: 0.5, 2: 0.7, 3: 0.6}, "max", (0.7, 2)),
        ({1: 0.3, 2: 0.3}, "min", (0.3, 2)),
        ({1: 0.7, 2: 0.7}, "max", (0.7, 2)),
        ({1: NAN, 2: -INF, 3: 0.9}, "min", (0.9, 3)),
        ({1: INF, 2: 0.1}, "max", (0.1, 2)),
        ({1: None, 2: 0.0}, "min", (0.0, 2)),
    ],
)
def test_best_checkpoint_has_the_last_lowest_or_highest_finite_value(
    values: dict[int, float | None], mode: Any, best: tuple[float, int]
) -> None:
    saved = [Saved(step, {} if value is None else {"val/loss": value, "x": 9.0}) for step, value in values.items()]
    assert best_checkpoint(saved, CheckpointPolicy(mode=mode)) == BestRecord("val/loss", mode, *best)


def test_best_checkpoint_is_finite_if_there_is_one() -> None:
    broken, good = Saved(1, {"val/loss": 0.1}, finite=False), Saved(2, {"val/loss": 0.2})
    for saved, best in (([broken, good], good), ([broken], broken)):
        found = best_checkpoint(saved, CheckpointPolicy())
        assert found is not None and found.step == best.step


@pytest.mark.parametrize(
    ("metrics", "finite"),
    [
        ({}, True),
        ({"val/loss": 1.0, "val/auc": NAN}, True),
        ({"val/loss": 1.0, "train/loss": INF}, False),
        ({"val/loss": NAN}, False),
        ({"score": NAN}, False),
    ],
)
def test_metrics_show_whether_the_model_has_diverged(metrics: dict[str, float], finite: bool) -> None:
    assert are_finite(metrics, CheckpointPolicy()) is finite
    assert are_finite(metrics, CheckpointPolicy(ignore_nan=True))


@pytest.mark.parametrize(
    ("steps", "best", "keep", "deleted"),
    [
        ([1, 2, 3, 4], None, 3, [1]),
        ([1, 2, 3, 4], 1, 3, []),
        ([1, 2, 3, 4], 4, 2, [1, 2]),
        ([1, 2, 3, 4], 2, 1, [1, 3]),
        ([1, 2, 3], 2, 3, []),
        ([5, 9, 2], None, 1, [5, 9]),
        ([], None, 1, []),
    ],
)
def test_newest_checkpoints_and_the_best_one_are_kept(
    steps: list[int], best: int | None, keep: int, deleted: list[int]
) -> None:
    record = None if best is None else BestRecord("val/loss", "min", 0.1, best)
    assert superseded([Saved(step, {}) for step in steps], record, CheckpointPolicy(keep=keep)) == deleted


def test_last_finite_checkpoint_is_kept() -> None:
    saved = [Saved(step, {}, finite=step <= 2) for step in (1, 2, 3, 4, 5)]
    assert superseded(saved, None, CheckpointPolicy(keep=2)) == [1, 3]


# --- Sharded checkpoints become one: equal tensors, complete or not at all, in files of limited size ---


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


def test_damaged_checkpoint_is_named_and_nothing_is_written(checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "model.rank-1.safetensors"
    os.chmod(file, 0o644)
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[:-1] + b"\xff")
    with pytest.raises(CheckpointDamaged, match=r"SHA-256 of model\.rank-1\.safetensors"):
        consolidate(checkpoint, tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
