"""The bars fit every terminal, and stay where they are."""

from __future__ import annotations

import pytest

from ddptrain.driver.display import messages as told
from ddptrain.driver.display.progress_bars import ASCII_GLYPHS, UNICODE_GLYPHS, Bars, Glyphs
from ddptrain.driver.display.terminal import cells
from ddptrain.protocol.events import Metrics, Progress


def drawn(bars: Bars, columns: int = 120, rows: int = 24) -> list[str]:
    return ["".join(piece.text for piece in row) for row in bars.block(65.0, columns, rows)]


def fresh(ranks: int, glyphs: Glyphs) -> Bars:
    bars = Bars("run-1", glyphs)
    bars.tell(told.Expected(ranks))
    return bars


def running(ranks: int, host: str = "node") -> Bars:
    bars = fresh(ranks, ASCII_GLYPHS)
    bars.tell(told.Status("training"))
    for rank in range(ranks):
        bars.tell(told.RankStarted(rank, host.format(rank), 100 + rank))
        for second in (0, 1):
            event = Progress(second * 10**9, second * 1200.0, 2400.0 * (1 + rank), "samples")
            bars.tell(told.RankProgress(rank, event))
        bars.tell(told.RankMetrics(rank, Metrics(0, {"train/loss": 2.5 + rank, "lr": 0.1})))
    return bars


def test_bar_tells_how_far_how_well_how_fast_and_how_long() -> None:
    first, second, status = drawn(running(2))
    assert first == f"rank 0  {'#' * 20}{'-' * 20}  50%  1,200/2,400  loss 2.500  1,200 samples/s  ETA 0:01"
    assert second == f"rank 1  {'#' * 10}{'-' * 30}  25%  1,200/4,800  loss 3.500  1,200 samples/s  ETA 0:03"
    assert status == "run-1 | 1:05 | training"


def test_host_is_shown_where_there_are_several() -> None:
    assert "node0" in drawn(running(2, "node{}"))[0]
    assert "node" not in drawn(running(2))[0]


def test_no_row_is_wider_than_the_terminal() -> None:
    bars = running(3, "node{}.example.com")
    bars.tell(told.Redrawn(1, "日本" * 100))
    for columns in range(1, 130):
        assert max(cells(row) for row in drawn(bars, columns)) <= columns


def test_narrow_terminal_keeps_rank_and_percent() -> None:
    assert drawn(running(1), 30)[0] == f"rank 0  {'#' * 8}{'-' * 9}  50%"
    assert drawn(running(1), 16)[0] == "rank 0    50%"


@pytest.mark.parametrize("ranks", [1, 2, 16, 64])
def test_block_takes_half_of_the_terminal_at_most(ranks: int) -> None:
    bars = running(ranks)
    bars.tell(told.Redrawn(0, "10%"))
    for rows in range(1, 150):
        assert 1 <= len(drawn(bars, rows=rows)) <= max(rows // 2, 1)


def test_many_ranks_are_summed_up_in_one_row() -> None:
    rows = drawn(running(64), rows=12)
    assert [row[:7].strip() for row in rows[:4]] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert rows[4] == "60 more ranks | 1% to 10% | 72,000 samples/s in all"


def test_failed_rank_among_many_is_seen() -> None:
    bars = running(64)
    bars.tell(told.RankEnded(63, ok=False))
    assert drawn(bars, rows=12)[4].endswith("1 failed")


def test_columns_do_not_shrink_so_that_bars_stay_in_place() -> None:
    bars = running(1)
    before = drawn(bars)[0].index("%")
    bars.tell(told.RankProgress(0, Progress(2 * 10**9, 1.0, 2400.0, "samples")))
    assert drawn(bars)[0].index("%") == before


def test_end_of_a_rank_is_shown() -> None:
    bars = running(2)
    bars.tell(told.RankEnded(0, ok=True))
    bars.tell(told.RankEnded(1, ok=False))
    assert drawn(bars)[0].endswith("done") and drawn(bars)[1].endswith("failed")


def test_new_start_of_a_rank_forgets_the_attempt_before() -> None:
    bars = running(1)
    bars.tell(told.RankStarted(0, "node", 7))
    assert "%" not in drawn(bars)[0] and "loss" not in drawn(bars)[0]


def test_progress_bar_of_a_rank_stands_below_its_own() -> None:
    bars = running(2)
    bars.tell(told.Redrawn(0, "\x1b[Aloading 10%"))
    assert drawn(bars)[1] == "  loading 10%"
    bars.tell(told.Redrawn(0, ""))
    assert len(drawn(bars)) == 3


def test_unknown_total_shows_what_is_known() -> None:
    bars = fresh(1, UNICODE_GLYPHS)
    bars.tell(told.RankProgress(0, Progress(0, 7.0, None, "steps")))
    assert drawn(bars)[0] == f"rank 0  {'─' * 40}  7  waiting"


def test_control_characters_in_names_are_removed() -> None:
    bars = running(1)
    bars.tell(told.Status("one\ntwo\x1b[2J"))
    bars.tell(told.RankProgress(0, Progress(2 * 10**9, 1300.0, 2400.0, "sam\x1b[2Jples")))
    assert not any("\x1b" in row or "\n" in row for row in drawn(bars))
