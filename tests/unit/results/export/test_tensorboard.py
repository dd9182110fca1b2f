from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddptrain.errors import UsageError
from ddptrain.results.export.tensorboard import export_tensorboard, points
from ddptrain.results.metrics import Series
from tests.unit.results.export.test_tables import put


def test_tensorboard_reads_the_files(tmp_path: Path) -> None:
    lines = [{"step": step, "rank": rank, "val/loss": step + rank / 2} for step in (1, 2) for rank in (0, 1)]
    view = put(tmp_path, "a", *lines, {"step": 3, "big": 1e300, "\ud800": 1.0}, params={"layers": 2})
    for _ in range(2):  # a second export replaces the first one
        (path,) = export_tensorboard([view], tmp_path / "tb")
    found = EventAccumulator(str(path.parent))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("val/loss")] == [(1, 1.25), (2, 2.25)]
    assert found.Scalars("big")[0].value == float("inf")
    assert b"| layers | 2 |" in found.Tensors("params/text_summary")[0].tensor_proto.string_val[0]


def test_points_have_a_step_in_any_case() -> None:
    nan = float("nan")
    series = {
        ("x", 0): Series([1.0, 2.0, 3.0], [None, None, 5.0], [4.0, None, None], [1.0, 2.0, nan]),
        ("x", 1): Series([1.5], [1e300], [None], [9.0]),
    }
    assert points(series, "x") == [(2.0, 1, 2.0), (1.0, 4, 1.0)]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(UsageError, match=r"pip install 'tensorboard>=2.17'"):
        export_tensorboard([], tmp_path)
