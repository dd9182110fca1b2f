"""The use of processes, from files of /proc with known content and from real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddptrain.worker.system.process_metrics import RankMeter, core_wait_s, members, process_use


def test_counters_of_this_process() -> None:
    use = process_use(os.getpid())
    assert use is not None
    assert use.cpu_s > 0.1
    assert use.rss_bytes > 1_000_000
    assert use.open_files is not None
    assert use.open_files >= 3


def test_process_that_has_ended_has_no_counters() -> None:
    assert process_use(1 << 30) is None


def test_wait_for_a_core_is_read_from_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "schedstat").write_text("5000000000 1500000000 12\n")
    assert core_wait_s(7, tmp_path) == 1.5
    assert core_wait_s(8, tmp_path) is None


def test_rank_and_its_children_are_measured_together() -> None:
    code = "import subprocess, sys; print(1, flush=True); subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, process_group=0) as leader:
        try:
            assert leader.stdout is not None
            leader.stdout.readline()
            deadline = time.monotonic() + 60
            meter = RankMeter(leader.pid)
            use: dict[str, float] = {}
            while use.get("processes") != 2 or use.get("cpu_percent", 0) < 5:
                assert time.monotonic() < deadline
                time.sleep(0.2)
                use = meter.read(members([leader.pid])[leader.pid], time.monotonic())
            assert use["rss_bytes"] > 1_000_000
            assert use["open_files"] >= 6
        finally:
            os.killpg(leader.pid, 9)


def test_ended_rank_has_no_metrics() -> None:
    assert RankMeter(1 << 30).read([1 << 30], time.monotonic()) == {}


def test_counter_of_a_child_that_has_ended_does_not_count_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddptrain.worker.system import process_metrics

    uses = [process_metrics.ProcessUse(5.0, 1, 0, 0, 1), process_metrics.ProcessUse(1.0, 1, 10, 0, 1)]
    monkeypatch.setattr(process_metrics, "process_use", lambda pid: uses.pop(0))
    monkeypatch.setattr(process_metrics, "core_wait_s", lambda pid: None)
    meter = RankMeter(1)
    assert "cpu_percent" not in meter.read([1], time.monotonic() + 1)
    found = meter.read([1], time.monotonic() + 3)
    assert found["cpu_percent"] == 0.0
    assert found["read_bytes_s"] == pytest.approx(5.0, rel=0.2)
