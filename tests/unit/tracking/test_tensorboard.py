"""What TensorBoard reads from the event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddptrain.rank.media import png
from ddptrain.tracking.protocol import Checkpoint, Image, Numbers, Table
from ddptrain.tracking.tensorboard import TensorBoardTracker
from tests.unit.tracking.trackers import facts


def read(folder: Path) -> Any:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    found.Reload()
    return found


def started(folder: Path, mode: str = "rank0", **changes: Any) -> TensorBoardTracker:
    tracker = TensorBoardTracker({"mode": mode})
    tracker.start(facts(folder, **changes))
    return tracker


def test_numbers_pictures_tables_and_the_configuration_are_read_back(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(np.zeros((4, 6, 3), np.uint8)))
    found: dict[str, str] = {}
    tracker = started(tmp_path, config={"params": {"epochs": 3}, "name": "x"}, found=found.update)
    tracker.log(Numbers(2_000_000_000, {"train/loss": 0.5, "lr": 0.1}, 7, 1.5))
    tracker.log(Numbers(3_000_000_000, {"val/loss": float("nan")}, None, 2.0))
    tracker.log(Image(1, "examples", tmp_path / "a.png", "", 25))
    tracker.log(Table(1, "predictions", ("image", "label"), ((Image(1, "x", Path("y")), "a|b"), (None, 2)), 3))
    tracker.log(Checkpoint(1, 5, tmp_path, {}))
    tracker.finish("finished")
    assert found == {"folder": "tracking/tensorboard"}

    board = read(tmp_path / "tensorboard")
    assert [(e.wall_time, e.step, e.value) for e in board.Scalars("train/loss")] == [(2.0, 7, 0.5)]
    assert board.Scalars("lr")[0].value == pytest.approx(0.1)
    assert [event.step for event in board.Scalars("val/loss")] == [2]
    (picture,) = board.Images("examples")
    assert (picture.width, picture.height, picture.step) == (6, 4, 25)
    assert picture.encoded_image_string == (tmp_path / "a.png").read_bytes()
    (table,) = board.Tensors("predictions/text_summary")
    assert table.tensor_proto.string_val[0].decode().splitlines() == [
        "| image | label |",
        "| --- | --- |",
        "| (image) | a\\|b |",
        "|  | 2 |",
    ]
    (config,) = board.Tensors("config/text_summary")
    assert "* params:\n    * epochs: 3" in config.tensor_proto.string_val[0].decode()


def test_resumed_attempt_goes_on_in_the_same_curves_where_the_one_before_is_repeated(tmp_path: Path) -> None:
    for attempt, steps in ((1, range(10)), (2, range(6, 12))):
        tracker = started(tmp_path, attempt=attempt, resumed=attempt > 1)
        for step in steps:
            tracker.log(Numbers(attempt * 1_000_000_000, {"loss": float(attempt)}, step))
        assert len(read(tmp_path / "tensorboard").Scalars("loss")) >= 10  # also of a rank that is killed now
        tracker.finish("failed")
    curve = read(tmp_path / "tensorboard").Scalars("loss")
    assert [(event.step, event.value) for event in curve] == [(step, 1.0 if step < 6 else 2.0) for step in range(12)]


def test_rows_between_the_checkpoint_and_the_first_ones_after_it_are_not_shown(tmp_path: Path) -> None:
    for attempt, steps in ((1, range(10)), (2, (8, 10))):
        tracker = started(tmp_path, attempt=attempt, resumed=attempt > 1, resumed_from=5 if attempt > 1 else None)
        for step in steps:
            tracker.log(Numbers(attempt * 1_000_000_000, {"loss": float(attempt)}, step))
        tracker.finish("failed")
    curve = read(tmp_path / "tensorboard").Scalars("loss")
    assert [(event.step, event.value) for event in curve] == [*((step, 1.0) for step in range(6)), (8, 2.0), (10, 2.0)]


def test_each_rank_has_a_curve_of_its_own_where_that_is_asked_for(tmp_path: Path) -> None:
    for rank in (0, 1):
        tracker = started(tmp_path, "process", rank=rank)
        tracker.log(Numbers(1, {"loss": float(rank)}, 1))
        tracker.finish("finished")
    assert [read(tmp_path / f"tensorboard/rank-{rank}").Scalars("loss")[0].value for rank in (0, 1)] == [0.0, 1.0]


def test_numbers_without_a_step_are_counted(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    for value in (1.0, 2.0, 3.0):
        tracker.log(Numbers(1, {"loss": value}))
    tracker.finish("finished")
    assert [event.step for event in read(tmp_path / "tensorboard").Scalars("loss")] == [0, 1, 2]
