"""Metrics of runs and of their hosts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ddptrain.protocol.news import SystemSample
from ddptrain.results.errors import ResultsError
from ddptrain.results.metrics import (
    AllSeries,
    LatestMetrics,
    MetricLine,
    MetricsReader,
    Series,
    drop_replaced,
    read_series,
)
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.system import SystemFile, SystemLine, SystemSummary, read_system, system_series, use_lines

# --- metrics ---


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


def went_on(attempt: int, step: int, epoch: float | None = None) -> MetricLine:
    return MetricLine(0.0, step, epoch, 0, {}, attempt)


@pytest.mark.parametrize(
    ("logged", "counted"),
    [
        # One attempt: all of it counts.
        ([(1, 1), (1, 2), (1, 2)], [(1, 1), (1, 2), (1, 2)]),
        # What came after the checkpoint is replaced, also by an attempt that has not come so far yet.
        ([(1, 1), (1, 2), (1, 3), (1, 4), went_on(2, 2), (2, 3)], [(1, 1), (1, 2), (2, 3)]),
        ([(1, 1), (1, 2), (1, 3), went_on(2, 2)], [(1, 1), (1, 2)]),
        # Code that counts from 0 logs the checkpoint's step again.
        ([(1, 1), (1, 2), went_on(2, 2), (2, 2), (2, 3)], [(1, 1), (2, 2), (2, 3)]),
        # A third attempt may go on from before the second.
        ([(1, 1), (1, 2), went_on(2, 2), (2, 3), (2, 4), went_on(3, 1), (3, 2)], [(1, 1), (3, 2)]),
        ([(1, 1), (2, 2), (2, 3), (3, 4)], [(1, 1), (2, 2), (2, 3), (3, 4)]),
        # Without a line of a checkpoint (an older version, or none) it goes on where its first line says.
        ([(1, 1), (1, 2), (2, 1)], [(2, 1)]),
        ([(1, 1), (1, 2), (1, 3), (2, 3)], [(1, 1), (1, 2), (2, 3)]),
    ],
)
def test_of_several_attempts_the_one_that_counts_is_read(
    logged: list[tuple[int, int] | MetricLine], counted: list[tuple[int, int]]
) -> None:
    found = drop_replaced([each if isinstance(each, MetricLine) else line(*each) for each in logged])
    assert [(each.attempt, each.step) for each in found] == counted


def test_values_at_the_checkpoint_stay_unless_they_are_logged_again() -> None:
    lines = [line(1, 2, loss=1.0, acc=0.5), line(1, 2, rank=1, loss=3.0), went_on(2, 2), line(2, 2, loss=2.0)]
    found = drop_replaced(lines)
    assert [(each.rank, each.values) for each in found] == [(0, {"acc": 0.5}), (1, {"loss": 3.0}), (0, {"loss": 2.0})]


def test_lines_without_a_step_are_told_apart_by_their_epoch() -> None:
    lines = [line(1, None, 1.0), line(1, None, 2.0), line(1, None), went_on(2, 10, 1.0)]
    assert [(each.attempt, each.epoch) for each in drop_replaced(lines)] == [(1, 1.0), (1, None)]


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
            latest.logged(None, 2, {"loss": 0.5, "val/loss": 0.7})
        latest.logged(0, 2, {"loss": 1.0})
        latest.logged(1, 2, {"loss": 3.0})
        if not saved_first:
            latest.logged(None, 2, {"loss": 0.5, "val/loss": 0.7})
        assert latest.as_dict() == {"loss": 2.0, "val/loss": 0.7}
        latest.logged(0, 3, {"loss": 4.0})
        latest.logged(None, 2, {"loss": 0.1})  # it came home late
        assert latest.as_dict() == {"loss": 4.0, "val/loss": 0.7}


def test_values_without_a_step_are_the_newest_of_each_rank() -> None:
    latest = LatestMetrics()
    latest.logged(0, None, {"loss": 1.0})
    latest.logged(1, None, {"loss": 2.0})
    latest.logged(0, None, {"loss": 4.0})
    assert latest.as_dict() == {"loss": 3.0}
    latest.logged(None, 5, {"loss": 0.5})
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


# --- system ---


def sample(host: str = "h0", at_s: float = 10.0, rank: int = 0, cpu_percent: float = 50.0) -> SystemSample:
    ranks = {str(rank): {"cpu_percent": 99.0, "rss_bytes": 2e9}}
    use = {"cpu_percent": cpu_percent, "memory_bytes": 4e9, "memory_total_bytes": 8e9}
    return SystemSample(rank, int(at_s * 1e9), host, use, ranks)


def test_sample_becomes_a_line_for_the_host_and_one_for_each_rank(writer: RunWriter) -> None:
    writer.system(sample())
    lines = [json.loads(line) for line in writer.layout.system_jsonl.read_text().splitlines()]
    head = {"time_s": 10.0, "attempt": 1, "host": "h0"}
    assert lines == [
        {**head, "rank": None, "cpu_percent": 50.0, "memory_bytes": 4e9, "memory_total_bytes": 8e9},
        {**head, "rank": 0, "cpu_percent": 99.0, "rss_bytes": 2e9},
    ]


def test_run_without_samples_has_no_file(writer: RunWriter) -> None:
    assert not writer.layout.system_jsonl.exists()
    assert read_system(writer.layout.system_jsonl) == []


def test_host_of_several_workers_has_one_line_for_each_time(tmp_path: Path) -> None:
    file = SystemFile(tmp_path / "system.jsonl")
    for at_s in range(3):
        file.append(sample(at_s=at_s, rank=0), 1)
        file.append(sample(at_s=at_s + 0.1, rank=1), 1)
    file.close()
    lines = read_system(tmp_path / "system.jsonl")
    assert [line.time_s for line in lines if line.rank is None] == [0.0, 1.0, 2.0]
    assert [line.rank for line in lines if line.rank is not None] == [0, 1] * 3


def test_damaged_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "system.jsonl"
    good = json.dumps({"time_s": 1.0, "host": "h", "rank": 0, "cpu_percent": 5, "rss_bytes": "much", "other": 1})
    bad = ["{", "[]", "7", '{"time_s": "x", "host": "h"}', '{"time_s": NaN, "host": "h"}', "[" * 100_000]
    bad += ['{"time_s": 1, "host": 5}', '{"time_s": 1, "host": "h", "rank": true, "cpu_percent": 1}']
    path.write_text("\n".join([*bad, good, '{"time_s": 2.0, "host": "h", "ra']))
    (line,) = read_system(path)
    assert (line.time_s, line.host, line.rank, line.values) == (1.0, "h", 0, {"cpu_percent": 5.0})


def test_file_that_is_a_link_is_neither_read_nor_written(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("")
    (tmp_path / "system.jsonl").symlink_to("target")
    with pytest.raises(ResultsError, match="symbolic link"):
        SystemFile(tmp_path / "system.jsonl").append(sample(), 1)
    with pytest.raises(ResultsError):
        read_system(tmp_path / "system.jsonl")


def test_series_have_a_curve_for_each_rank_and_each_host(tmp_path: Path) -> None:
    file = SystemFile(tmp_path / "system.jsonl")
    for at_s in (1.0, 2.0):
        file.append(sample("b", at_s, 1, cpu_percent=at_s), 1)
        file.append(sample("a", at_s, 0), 1)
    file.close()
    series = system_series(read_system(tmp_path / "system.jsonl"))
    assert series["system/host/cpu_percent", 1].value == [1.0, 2.0]
    assert series["system/cpu_percent", 0].time_s == [1.0, 2.0]
    assert series["system/cpu_percent", 0].step == [None, None]


def test_use_of_hosts_and_ranks_with_gpus_has_means_of_rates_and_the_largest_memory() -> None:
    lines = [
        SystemLine(1.0, "b", None, {"disk_bytes_s": 1e6, "network_bytes_s": 5e6}),
        SystemLine(2.0, "b", None, {"disk_bytes_s": 3e6}),
        SystemLine(1.0, "a", None, {"cpu_percent": 99.96, "network_bytes_s": 250e6}),
        SystemLine(1.0, "b", 1, {"cpu_percent": 50.0, "gpu_throttle": 0x24, "gpu_power_w": 100}),
        SystemLine(2.0, "b", 1, {"gpu_throttle": 0x4}),
        SystemLine(2.0, "a", 0, {"gpu_percent": 10.0, "gpu_memory_bytes": 4e9, "gpu_memory_total_bytes": 80e9}),
        SystemLine(3.0, "a", 0, {"gpu_percent": 30.0, "gpu_memory_bytes": 3e9, "gpu_temperature_c": 60.0}),
        SystemLine(4.0, "a", 0, {"gpu_temperature_c": 55.0, "rss_bytes": 2e9, "gpu_throttle": 0x1}),
    ]
    assert use_lines(lines) == [
        ("a", "CPU 100.0 %, network 250 MB/s"),
        ("b", "disk 2.00 MB/s, network 5.00 MB/s"),
        ("rank 0", "resident memory up to 2.00 GB, GPU 20.0 %, GPU memory up to 4.00 of 80.0 GB, up to 60.0 °C"),
        ("rank 1", "CPU 50.0 % of a core, 100 W, clock was reduced: power limit, software thermal slowdown"),
    ]


def test_means_of_use_and_the_fullest_and_hottest() -> None:
    summary = SystemSummary()
    for host, percent, used in (("a", 20.0, 12e9), ("b", 40.0, 32e9)):
        gpu = {"gpu_percent": percent * 2, "gpu_memory_bytes": used, "gpu_memory_total_bytes": 80e9}
        use = {"cpu_percent": percent, "memory_bytes": used, "memory_total_bytes": 64e9}
        summary.add(SystemSample(0, 1, host, use, {host: {**gpu, "gpu_temperature_c": percent + 30}}))
    assert summary.facts() == ["GPU 60 % 32/80 GB 70 °C", "CPU 30 %", "memory 32/64 GB"]
