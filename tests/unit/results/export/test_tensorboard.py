from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddptrain.errors import UsageError
from ddptrain.results.export import tensorboard
from ddptrain.results.export.tensorboard import export_tensorboard, points
from ddptrain.results.lookup import RunView
from ddptrain.results.metrics import Series, read_series
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


def test_system_metrics_have_seconds_since_the_start_as_steps(tmp_path: Path) -> None:
    def write(view: RunView) -> list[Any]:
        lines = [(1735689600.0 - 5, 0, 1.0), (1735689600.0 + 9.9, 0, 2.0), (1735689600.0 + 2, None, 3.0)]
        texts = [{"time_s": at, "host": "h", "rank": rank, "cpu_percent": value} for at, rank, value in lines]
        texts.append({"time_s": 1e200, "host": "h", "rank": 0, "cpu_percent": 4.0})
        view.layout.system_jsonl.write_text("".join(f"{json.dumps(text)}\n" for text in texts))
        (path,) = export_tensorboard([view], tmp_path / "tb")
        found = EventAccumulator(str(path.parent))
        found.Reload()
        scalars = (found.Scalars(tag) for tag in ("system/cpu_percent/rank_0", "system/host/cpu_percent/host_0"))
        return [[(event.step, event.value) for event in one] for one in scalars]

    known = put(tmp_path, "a", started_at="2025-01-01T00:00:00Z")
    assert write(known) == [[(0, 1.0), (9, 2.0)], [(2, 3.0)]]
    assert write(put(tmp_path, "b")) == [[(0, 1.0), (14, 2.0)], [(0, 3.0)]]


def test_points_of_a_metric_have_the_latest_time_and_the_mean_of_the_ranks() -> None:
    series = {
        ("x", 0): Series([1.0, 2.0], [7.0, 3.9], [None, None], [1.0, 5.0]),
        ("x", 1): Series([4.0], [7.0], [None], [2.0]),
        ("y", 0): Series([9.0], [7.0], [None], [9.0]),
        ("calls", 0): Series([1.0, 2.0], [None, None], [None, None], [1.0, 2.0]),
    }
    assert points(series, "x") == [(2.0, 3, 5.0), (4.0, 7, 1.5)]
    assert points(series, "calls") == [(1.0, 0, 1.0), (2.0, 1, 2.0)]
    edge = {
        ("x", 0): Series([1.0] * 3, [float(1 << 62), float((1 << 62) - 1024), -float(1 << 62)], [None] * 3, [1.0] * 3)
    }
    assert [step for _, step, _ in points(edge, "x")] == [(1 << 62) - 1024]


@pytest.mark.parametrize(
    ("value", "stored"), [(1.5, 1.5), (1e39, float("inf")), (-1e39, float("-inf")), (float("inf"), float("inf"))]
)
def test_numbers_that_the_format_cannot_hold_are_infinite(value: float, stored: float) -> None:
    assert tensorboard._as_float32(value) == stored


def test_parameters_are_a_table() -> None:
    assert tensorboard._as_table({"a": "x|y", "b": {"c": 1}}) == (
        "| parameter | value |\n| --- | --- |\n| a | x\\|y |\n| b.c | 1 |"
    )


def test_first_events_have_the_time_of_the_start(tmp_path: Path) -> None:
    def events(view: RunView) -> list[Any]:
        return list(tensorboard._events(view, read_series(view.layout.metrics_jsonl), {}))

    first, params, metric = events(put(tmp_path, "a", {"step": 4, "x": 0.5}, started_at="2025-01-01T00:00:00Z"))
    assert (first.wall_time, first.file_version) == (1735689600.0, "brain.Event:2")
    assert (params.wall_time, params.step, params.summary.value[0].tag) == (1735689600.0, 0, "params/text_summary")
    assert (metric.wall_time, metric.step) == (1.5, 4)
    assert (metric.summary.value[0].tag, metric.summary.value[0].simple_value) == ("x", 0.5)
    assert [event.wall_time for event in events(put(tmp_path, "b"))] == [0.0, 0.0]
