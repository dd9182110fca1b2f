from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from ddptrain.results.find import RunView
from ddptrain.results.layout import RunLayout
from ddptrain.results.record import AttemptRecord, BestRecord, DriverRecord, FailureRecord, RunRecord
from ddptrain.results.render import duration, print_table, rows, sections, size
from ddptrain.tables import clean, plain_sections, plain_table


@pytest.mark.parametrize("width", [60, 80, 200])
def test_nothing_is_cut_off_a_row_by_a_narrow_terminal(tmp_path: Path, width: int) -> None:
    run_id = "images-local-20261121-171552-deb2"
    record = RunRecord(run_id=run_id, status="failed", failure=FailureRecord(1, "h", "exception", "E", "no such name"))
    file = io.StringIO()
    print_table([RunView(RunLayout(tmp_path), record)], Console(file=file, width=width))
    assert run_id in file.getvalue() and "rank 1: E no such name" in " ".join(file.getvalue().split())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.04, "0.0 s"), (59.9, "59.9 s"), (185, "3m 05s"), (7620.4, "2h 07m")],
)
def test_durations_are_short(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (999, "999 B"), (2_202_010, "2.1 MiB"), (1 << 50, "1024.0 TiB")]
)
def test_sizes_are_short(size_bytes: int, text: str) -> None:
    assert size(size_bytes) == text


def test_escape_codes_of_a_failure_do_not_reach_the_terminal() -> None:
    assert clean("a\x1b[2Jb\n\tc\r") == "a\ufffd[2Jb\n    c\ufffd"


def test_a_row_tells_the_failure_before_the_best(tmp_path: Path) -> None:
    failure = FailureRecord(1, "h", "exception", "ValueError", "no such name\nat all " + "x" * 200)
    record = RunRecord(run_id="r", status="failed", failure=failure, best=BestRecord("val/loss", "min", 1.0, 3))
    (row,) = rows([RunView(RunLayout(tmp_path), record)])
    assert row[-1] == "rank 1: ValueError no such name"


@pytest.mark.parametrize(
    ("record", "result"),
    [
        (RunRecord(best=BestRecord("val/loss", "min", 1.23456, 3)), "best val/loss 1.235 at step 3"),
        (RunRecord(last_metrics={"lr": 0.1, "train/loss": 2.0}), "train/loss 2"),
        (RunRecord(last_metrics={"lr": None}), "lr -"),
        (RunRecord(), ""),
    ],
)
def test_a_row_ends_in_what_the_run_came_to(tmp_path: Path, record: RunRecord, result: str) -> None:
    assert rows([RunView(RunLayout(tmp_path), record)])[0][-1] == result


def test_columns_are_aligned() -> None:
    assert plain_table([("A", "B"), ("long", "x")]) == "A     B\nlong  x"


def test_empty_parts_are_left_out_and_long_values_indented(tmp_path: Path) -> None:
    failure = FailureRecord(message="no", traceback="one\ntwo\n")
    view = RunView(RunLayout(tmp_path), RunRecord(run_id="r", status="failed", failure=failure))
    text = plain_sections(sections(view))
    assert "  message    no\n  traceback  one\n             two" in text
    assert "artifacts" not in text and "best" not in text


def test_running_run_tells_its_driver_its_attempt_and_where_the_driver_prints(tmp_path: Path) -> None:
    attempts = (AttemptRecord(1, outcome="failed"), AttemptRecord(2))
    record = RunRecord(run_id="r", attempts=attempts, driver=DriverRecord(7, "far"))
    view = RunView(RunLayout(tmp_path), record)
    view.layout.driver_log.touch()
    about = dict(sections(view)[0][1])
    told = (about["driver"], about["attempt"], about["driver's log"])
    assert told == ("process 7 on far", "2", str(tmp_path / "driver.log"))
