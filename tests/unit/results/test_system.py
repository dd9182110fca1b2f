from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddptrain.protocol.worker_notices import SystemSample
from ddptrain.results.errors import ResultsError
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.system import SystemFile, SystemLine, SystemSummary, read_system, system_series, use_lines


def sample(host: str = "h0", at_s: float = 10.0, rank: int = 0, cpu_percent: float = 50.0) -> SystemSample:
    ranks = {str(rank): {"cpu_percent": 99.0, "rss_bytes": 2e9}}
    use = {"cpu_percent": cpu_percent, "memory_bytes": 4e9, "memory_total_bytes": 8e9}
    return SystemSample(1, rank, int(at_s * 1e9), host, use, ranks)


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


def test_large_file_gets_fewer_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddptrain.results.system._HALVED_EVERY_BYTES", 5_000)
    file = SystemFile(tmp_path / "system.jsonl")
    for at_s in range(1000):
        file.append(sample(at_s=at_s), 1)
    file.close()
    times = [line.time_s for line in read_system(tmp_path / "system.jsonl") if line.rank is None]
    assert times[:10] == list(range(10))
    assert 20 < len(times) < 300
    assert times[-1] - times[-2] >= 4


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


def test_use_of_a_run_as_text(tmp_path: Path) -> None:
    file = SystemFile(tmp_path / "system.jsonl")
    file.append(sample(cpu_percent=20.0), 1)
    file.append(sample(cpu_percent=40.0), 1)
    file.close()
    assert use_lines(read_system(tmp_path / "system.jsonl")) == [
        ("h0", "CPU 30.0 %, memory up to 4.00 of 8.00 GB"),
        ("rank 0", "CPU 99.0 % of a core, resident memory up to 2.00 GB"),
    ]


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


def test_use_of_many_ranks_is_that_of_the_first_64() -> None:
    lines = [SystemLine(1.0, "h", rank, {"cpu_percent": 1.0}) for rank in reversed(range(70))]
    assert [name for name, _ in use_lines(lines)] == ["h", *(f"rank {rank}" for rank in range(64))]
    assert use_lines([]) == []


def test_nothing_is_shown_before_the_first_sample() -> None:
    assert SystemSummary().facts() == []


def test_means_of_use_and_the_fullest_and_hottest() -> None:
    summary = SystemSummary()
    for host, percent, used in (("a", 20.0, 12e9), ("b", 40.0, 32e9)):
        gpu = {"gpu_percent": percent * 2, "gpu_memory_bytes": used, "gpu_memory_total_bytes": 80e9}
        use = {"cpu_percent": percent, "memory_bytes": used, "memory_total_bytes": 64e9}
        summary.add(SystemSample(1, 0, 1, host, use, {host: {**gpu, "gpu_temperature_c": percent + 30}}))
    assert summary.facts() == ["GPU 60 % 32/80 GB 70 °C", "CPU 30 %", "memory 32/64 GB"]


def test_newest_sample_of_a_host_counts() -> None:
    summary = SystemSummary()
    for percent in (10.0, 90.0):
        summary.add(SystemSample(1, 0, 1, "a", {"cpu_percent": percent}, {}))
    assert summary.facts() == ["CPU 90 %"]


def test_numbers_that_are_not_known_are_left_out() -> None:
    summary = SystemSummary()
    summary.add(
        SystemSample(1, 0, 1, "a", {"memory_bytes": 5e9, "memory_total_bytes": 0.0}, {"0": {"cpu_percent": 1.0}})
    )
    assert summary.facts() == []
    summary.add(SystemSample(1, 0, 1, "a", {}, {"1": {"gpu_memory_bytes": 1e9}}))
    assert summary.facts() == ["GPU"]


def test_fullest_memory_is_the_one_with_the_largest_part_in_use() -> None:
    summary = SystemSummary()
    for host, used, total in (("a", 32e9, 80e9), ("b", 9.94e9, 16e9), ("c", 10e9, 40e9)):
        summary.add(SystemSample(1, 0, 1, host, {"memory_bytes": used, "memory_total_bytes": total}, {}))
    assert summary.facts() == ["memory 9.9/16 GB"]
    summary.add(SystemSample(1, 0, 1, "b", {"memory_bytes": 10e9, "memory_total_bytes": 16e9}, {}))
    assert summary.facts() == ["memory 10/16 GB"]
