"""The table of operators in which a profile spent most time."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

STEP_MARK = "ProfilerStep"  # the name by which TensorBoard's plugin and HolisticTraceAnalysis find steps
_MOST = 30
_COLUMNS = ("operator", "calls", "self_ms", "self_share", "total_ms")
_GPU_COLUMNS = ("gpu_self_ms", "gpu_self_share", "gpu_total_ms")


def operator_table(averages: Iterable[Any], *, has_gpu: bool) -> str:
    """Return the CSV table of the 30 operators with most time of their own; on a GPU, with most time there.

    averages: of profile.key_averages(), with times in microseconds. The shares (0 to 1) are of the time of all
    operators. GPU kernels are counted at the operators that started them.
    """
    rows = [one for one in averages if not one.key.startswith(STEP_MARK) and one.device_type.name == "CPU"]
    cpu_us = sum(max(0.0, one.self_cpu_time_total) for one in rows) or 1.0
    gpu_us = sum(max(0.0, one.self_device_time_total) for one in rows) or 1.0
    rows.sort(key=lambda one: -(one.self_device_time_total if has_gpu else one.self_cpu_time_total))
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS + (_GPU_COLUMNS if has_gpu else ()))
    for one in rows[:_MOST]:
        gpu = _times(one.self_device_time_total, gpu_us, one.device_time_total) if has_gpu else []
        writer.writerow([one.key, one.count, *_times(one.self_cpu_time_total, cpu_us, one.cpu_time_total), *gpu])
    return text.getvalue()


def _times(own_us: float, all_us: float, total_us: float) -> list[float]:
    return [round(own_us / 1e3, 3), round(own_us / all_us, 4), round(total_us / 1e3, 3)]
