from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ddptrain.results.metrics import (
    AllSeries,
    LatestMetrics,
    MetricLine,
    MetricsReader,
    Series,
    drop_replaced,
    read_series,
)
from ddptrain.results.run_record import AttemptRecord


def test_lines_are_read_as_they_come_and_a_partial_one_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    assert reader.read() == []
    path.write_text('{"time_s":1,"step":1,"epoch":null,"rank":0,"a":1}\n{"time_s":2,"ra')
    assert [line.values for line in reader.read()] == [{"a": 1.0}]
    assert reader.read() == []
    with path.open("a") as file:
        file.write('nk":1,"a":2}\n')
    (line,) = reader.read()
    assert (line.rank, line.step, line.values) == (1, None, {"a": 2.0})


def test_a_file_written_anew_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"rank":0,"a":1}\n{"rank":0,"a":2}\n')
    reader = MetricsReader(path)
    assert len(reader.read()) == 2
    path.write_text('{"rank":0,"a":3}\n')
    assert [line.values["a"] for line in reader.read()] == [3.0]


def test_damaged_lines_and_values_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\xff\xfe\n\n[1]\n{"a":1}\n{"rank":"0","a":1}\n{"rank":0,"a":null,"b":"x","c":true,"d":1e999}\n')
    series = read_series(path)
    assert set(series) == {("a", 0), ("d", 0)}
    assert math.isnan(series["a", 0].value[0]) and math.isnan(series["d", 0].value[0])


def test_series_are_kept_apart_by_name_and_rank(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(f'{{"rank":{rank},"step":{step},"a":{rank + step},"b":0}}\n' for step in (1, 2) for rank in (0, 1))
    )
    series = read_series(path)
    assert series["a", 1].value == [2.0, 3.0]
    assert series["a", 1].step == [1.0, 2.0]
    assert len(series) == 4


def line(attempt: int, step: float | None, epoch: float | None = None, rank: int = 0, **values: float) -> MetricLine:
    return MetricLine(0.0, step, epoch, rank, dict(values) or {"loss": 0.0}, attempt)


def went_on(number: int, step: int | None, epoch: float | None = None) -> AttemptRecord:
    return AttemptRecord(number, resumed_from=step, resumed_epoch=epoch)


@pytest.mark.parametrize(
    ("logged", "attempts", "counted"),
    [
        # One attempt: all of it counts, also what was logged twice.
        ([(1, 1), (1, 2), (1, 2)], [went_on(1, None)], [(1, 1), (1, 2), (1, 2)]),
        # What came after the checkpoint is replaced, also by an attempt that has not come so far yet.
        ([(1, 1), (1, 2), (1, 3), (1, 4), (2, 3)], [went_on(2, 2)], [(1, 1), (1, 2), (2, 3)]),
        ([(1, 1), (1, 2), (1, 3)], [went_on(2, 2)], [(1, 1), (1, 2)]),
        # Code that counts from 0 logs the checkpoint's step again.
        ([(1, 1), (1, 2), (2, 2), (2, 3)], [went_on(2, 2)], [(1, 1), (2, 2), (2, 3)]),
        # A third attempt may go on from before the second.
        ([(1, 1), (1, 2), (2, 3), (2, 4), (3, 2)], [went_on(2, 2), went_on(3, 1)], [(1, 1), (3, 2)]),
        ([(1, 1), (2, 2), (2, 3), (3, 4)], [went_on(2, 1), went_on(3, 3)], [(1, 1), (2, 2), (2, 3), (3, 4)]),
        # Without a checkpoint it goes on where its first line says.
        ([(1, 1), (1, 2), (2, 1)], [went_on(2, None)], [(2, 1)]),
        ([(1, 1), (1, 2), (1, 3), (2, 3)], [went_on(2, None)], [(1, 1), (1, 2), (2, 3)]),
        ([(1, 1), (1, 2)], [went_on(2, None)], [(1, 1), (1, 2)]),
        # The record is gone, or of an older version.
        ([(1, 1), (1, 2), (2, 2)], [], [(1, 1), (2, 2)]),
    ],
)
def test_of_several_attempts_the_one_that_counts_is_read(
    logged: list[tuple[int, int]], attempts: list[AttemptRecord], counted: list[tuple[int, int]]
) -> None:
    found = drop_replaced([line(*each) for each in logged], attempts)
    assert [(each.attempt, each.step) for each in found] == counted


def test_values_at_the_checkpoint_stay_unless_they_are_logged_again() -> None:
    lines = [line(1, 2, loss=1.0, acc=0.5), line(1, 2, rank=1, loss=3.0), line(2, 2, loss=2.0)]
    found = drop_replaced(lines, [went_on(2, 2)])
    assert [(each.rank, each.values) for each in found] == [(0, {"acc": 0.5}), (1, {"loss": 3.0}), (0, {"loss": 2.0})]


def test_lines_without_a_step_are_told_apart_by_their_epoch() -> None:
    lines = [line(1, None, 1.0), line(1, None, 2.0), line(1, None), line(2, None, 2.0)]
    found = drop_replaced(lines, [went_on(2, 10, 1.0)])
    assert [(each.attempt, each.epoch) for each in found] == [(1, 1.0), (1, None), (2, 2.0)]


@pytest.mark.parametrize(("attempt", "read"), [("2", 2), ("2.5", 1), ('"2"', 1), ("null", 1)])
def test_line_of_an_older_version_is_of_the_first_attempt(tmp_path: Path, attempt: Any, read: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"rank":0,"a":1,"attempt":{attempt}}}\n')
    (found,) = MetricsReader(path).read()
    assert (found.attempt, found.values) == (read, {"a": 1.0})


def test_of_a_larger_file_only_the_end_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"rank":0,"a":{number}}}\n' for number in range(5)]  # 17 bytes each
    path.write_text("".join(lines))
    reader = MetricsReader(path, last_bytes=34)
    assert [line.values["a"] for line in reader.read()] == [3.0, 4.0]
    with path.open("a") as file:
        file.write("".join(lines))
    assert [line.values["a"] for line in reader.read()] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [line.values["a"] for line in MetricsReader(path, last_bytes=35).read()] == [3.0, 4.0]
    assert len(MetricsReader(path, last_bytes=1_000).read()) == 10


def test_position_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"time_s":2.5,"step":3,"epoch":0.5,"rank":1,"attempt":4,"a":1}\n{"rank":0,"step":"x","time_s":null}\n'
    )
    assert MetricsReader(path).read() == [
        MetricLine(2.5, 3.0, 0.5, 1, {"a": 1.0}, 4),
        MetricLine(0.0, None, None, 0, {}, 1),
    ]


def test_values_of_a_later_attempt_replace_those_after_its_checkpoint_only() -> None:
    assert drop_replaced([line(1, 2), line(1, 3, 1.0)], [went_on(2, 2, 0.5)]) == [line(1, 2)]
    assert drop_replaced([line(1, None, 1.5), line(2, None, 1.5)], [went_on(1, None), went_on(2, 9)]) == [
        line(1, None, 1.5),
        line(2, None, 1.5),
    ]
    empty = MetricLine(0.0, 1.0, None, 0, {}, 1)
    assert drop_replaced([empty, line(2, 5)], [went_on(2, 1)]) == [empty, line(2, 5)]


def test_value_is_the_mean_of_the_ranks_at_the_newest_step() -> None:
    latest = LatestMetrics()
    latest.logged(0, 1, {"loss": 9.0})
    latest.logged(0, 2, {"loss": 1.0, "only": 5.0})
    assert latest.as_dict() == {"loss": 1.0, "only": 5.0}
    latest.logged(1, 1, {"loss": 7.0})  # a rank that is behind
    latest.logged(1, 2, {"loss": 3.0})
    assert latest.as_dict() == {"loss": 2.0, "only": 5.0}
    latest.logged(1, 2, {"loss": 5.0})  # once more for the same step
    assert latest.as_dict()["loss"] == 3.0


def test_what_ranks_logged_counts_before_the_value_of_a_checkpoint() -> None:
    for saved_first in (False, True):
        latest = LatestMetrics()
        if saved_first:
            latest.saved(2, {"loss": 0.5, "val/loss": 0.7})
        latest.logged(0, 2, {"loss": 1.0})
        latest.logged(1, 2, {"loss": 3.0})
        if not saved_first:
            latest.saved(2, {"loss": 0.5, "val/loss": 0.7})
        assert latest.as_dict() == {"loss": 2.0, "val/loss": 0.7}
        latest.logged(0, 3, {"loss": 4.0})
        latest.saved(2, {"loss": 0.1})  # it came home late
        assert latest.as_dict() == {"loss": 4.0, "val/loss": 0.7}


def test_values_without_a_step_are_the_newest_of_each_rank() -> None:
    latest = LatestMetrics()
    latest.logged(0, None, {"loss": 1.0})
    latest.logged(1, None, {"loss": 2.0})
    latest.logged(0, None, {"loss": 4.0})
    assert latest.as_dict() == {"loss": 3.0}
    latest.saved(5, {"loss": 0.5})
    latest.logged(0, None, {"loss": 8.0})
    assert latest.as_dict() == {"loss": 8.0}


def test_attempt_that_begins_at_an_earlier_step_counts_more_than_the_one_before() -> None:
    latest = LatestMetrics()
    latest.begin_attempt({"loss": 3.0, "gone": 1.0, "unknown": None})
    assert latest.as_dict() == {"loss": 3.0, "gone": 1.0}
    latest.logged(0, 10, {"loss": 2.0})
    latest.logged(0, 11, {"loss": 1.5})
    latest.begin_attempt()
    assert latest.as_dict()["loss"] == 1.5
    latest.logged(0, 6, {"loss": 1.8})
    assert latest.as_dict() == {"loss": 1.8, "gone": 1.0}


def test_values_of_a_run_are_those_of_its_series_and_checkpoints() -> None:
    series: AllSeries = {
        ("loss", 0): Series(step=[1, 2, 3], value=[9.0, 4.0, float("nan")]),
        ("loss", 1): Series(step=[1, 2, None], value=[7.0, 6.0, 8.0]),
        ("acc", 0): Series(step=[1, 2], value=[0.25, 0.5]),
    }
    assert LatestMetrics.of(series, [(2, {"acc": 0.75, "f1": 0.6})]).as_dict() == {"loss": 6.0, "acc": 0.5, "f1": 0.6}
    del series["loss", 1]
    assert LatestMetrics.of(series, []).as_dict() == {"loss": 4.0, "acc": 0.5}
