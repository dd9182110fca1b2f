"""The last words on a run, for people."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.driver.failure.run_end import RunEnd
from ddptrain.driver.failure.summary import summary_lines
from ddptrain.results.run_record import RunStatus
from ddptrain.results.run_writer import RunWriter


@pytest.mark.parametrize(("ranks", "on"), [(0, ""), (1, " on 1 rank"), (8, " on 8 ranks")])
def test_the_ranks_are_counted_where_there_were_any(tmp_path: Path, ranks: int, on: str) -> None:
    with RunWriter.create(tmp_path, "r", "name", "", "workload", world_size=ranks) as writer:
        told = summary_lines(writer, RunEnd(RunStatus.FAILED, 4, "no cluster"), 1.25)
    assert told == [f"run r failed after 1.2 s{on}", f"  results {tmp_path / 'r'}"]


def test_time_of_all_parts_is_told_and_that_of_the_last(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path, "r", "name", "", "workload") as writer:
        writer.update(earlier_s=100.0)
        told = summary_lines(writer, RunEnd(RunStatus.SUCCEEDED, 0), 130.25)
    assert told[0] == "run r succeeded after 130.2 s (30.2 s since it was resumed)"
