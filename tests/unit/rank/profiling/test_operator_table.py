from __future__ import annotations

import csv
import io
from types import SimpleNamespace

from ddptrain.rank.profiling import step_profiler
from ddptrain.rank.profiling.step_profiler import operator_table


def average(key: str, self_us: float, total_us: float, gpu_us: float = 0.0, kind: str = "CPU") -> SimpleNamespace:
    return SimpleNamespace(
        key=key,
        count=2,
        self_cpu_time_total=self_us,
        cpu_time_total=total_us,
        self_device_time_total=gpu_us,
        device_time_total=gpu_us,
        device_type=SimpleNamespace(name=kind),
    )


def rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def test_operators_are_sorted_by_their_own_time_without_the_marks_of_steps() -> None:
    found = rows(
        operator_table(
            [average("aten::add", 1000, 1500), average("ProfilerStep*", 9e6, 9e6), average("aten::mm", 3000, 3000)],
            has_gpu=False,
        )
    )
    assert found == [
        ["operator", "calls", "self_ms", "self_share", "total_ms"],
        ["aten::mm", "2", "3.0", "0.75", "3.0"],
        ["aten::add", "2", "1.0", "0.25", "1.5"],
    ]


def test_on_a_gpu_its_time_decides_and_kernels_have_no_rows() -> None:
    averages = [
        average("aten::add", 5000, 5000, 1000),
        average("aten::mm", 1000, 1000, 4000),
        average("sgemm_kernel", 0, 0, 4000, "CUDA"),
    ]
    found = rows(operator_table(averages, has_gpu=True))
    assert [row[0] for row in found] == ["operator", "aten::mm", "aten::add"]
    assert found[1][-3:] == ["4.0", "0.8", "4.0"]


def test_table_has_at_most_30_operators_and_none_is_no_error() -> None:
    assert len(rows(operator_table([average(f"op{at}", at, at) for at in range(100)], has_gpu=False))) == 31
    assert len(rows(operator_table([], has_gpu=False))) == 1


def test_times_are_milliseconds_with_three_digits_and_shares_have_four() -> None:
    assert step_profiler._times(1234.6, 3703.5, 7777.7) == [1.235, 0.3334, 7.778]
