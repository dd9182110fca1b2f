from __future__ import annotations

import math
from pathlib import Path

from ddptrain.results.metrics import MetricsReader, read_series


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
