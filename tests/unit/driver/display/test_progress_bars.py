"""The bars fit every terminal, and stay where they are."""

from __future__ import annotations

import time

import pytest

from ddptrain.driver.display import output_api
from ddptrain.driver.display.progress_bars import ASCII_GLYPHS, UNICODE_GLYPHS, Bars, Glyphs, Piece
from ddptrain.driver.display.terminal import RED, cells
from ddptrain.protocol.events import Metrics, Progress
from ddptrain.results.run_record import BestRecord


def drawn(bars: Bars, columns: int = 120, rows: int = 24) -> list[str]:
    return ["".join(piece.text for piece in row) for row in bars.block(65.0, columns, rows)]


def fresh(ranks: int, glyphs: Glyphs, *, all_ranks: bool = False) -> Bars:
    bars = Bars("run-1", glyphs, all_ranks=all_ranks)
    bars.handle(output_api.WorldSize(ranks))
    return bars


def running(ranks: int, host: str = "node", *, all_ranks: bool = False) -> Bars:
    bars = fresh(ranks, ASCII_GLYPHS, all_ranks=all_ranks)
    bars.handle(output_api.DriverStatus("training"))
    for rank in range(ranks):
        bars.handle(output_api.RankStarted(rank, host.format(rank), 100 + rank))
        for second in (0, 1):
            event = Progress(second * 10**9, second * 1200.0, 2400.0 * (1 + rank), "samples")
            bars.handle(output_api.RankProgress(rank, event))
        bars.handle(output_api.RankMetrics(rank, Metrics(0, {"train/loss": 2.5 + rank, "lr": 0.1})))
    return bars


def test_bar_tells_how_far_how_well_how_fast_and_how_long() -> None:
    first, second, status = drawn(running(2))
    assert first == f"rank 0  {'#' * 20}{'-' * 20}  50%  1,200/2,400  train/loss 2.500  1,200 samples/s  ETA 0:01"
    assert second == f"rank 1  {'#' * 10}{'-' * 30}  25%  1,200/4,800  train/loss 3.500  1,200 samples/s  ETA 0:03"
    assert status == "training | 1:05 | run-1"


def test_host_is_shown_where_there_are_several() -> None:
    assert "node0" in drawn(running(2, "node{}"))[0]
    assert "node" not in drawn(running(2))[0]


def test_no_row_is_wider_than_the_terminal() -> None:
    bars = running(3, "node{}.example.com")
    bars.handle(output_api.RedrawnLine(1, "日本" * 100))
    for columns in range(1, 130):
        assert max(cells(row) for row in drawn(bars, columns)) <= columns


def test_narrow_terminal_keeps_rank_and_percent() -> None:
    assert drawn(running(1), 30)[0] == f"rank 0  {'#' * 8}{'-' * 9}  50%"
    assert drawn(running(1), 16)[0] == "rank 0    50%"


@pytest.mark.parametrize("all_ranks", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 16, 64])
def test_block_takes_half_of_the_terminal_at_most(ranks: int, all_ranks: bool) -> None:
    bars = running(ranks, all_ranks=all_ranks)
    bars.handle(output_api.RedrawnLine(0, "10%"))
    for rows in range(1, 150):
        assert 1 <= len(drawn(bars, rows=rows)) <= max(rows // 2, 1)


def test_ranks_without_room_for_a_bar_are_summed_up_in_one_row() -> None:
    rows = drawn(running(64, all_ranks=True), rows=12)
    assert [row[:7].strip() for row in rows[:4]] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert rows[4] == "60 more ranks | 1% to 10% | 72,000 samples/s in all"


def test_failed_rank_among_many_is_seen() -> None:
    bars = running(64, all_ranks=True)
    bars.handle(output_api.RankEnded(63, ok=False))
    assert drawn(bars, rows=12)[4].endswith("1 failed")


def test_from_17_ranks_on_one_bar_stands_for_all_and_names_slowest_and_fastest() -> None:
    assert [row[:7].strip() for row in drawn(running(16), rows=60)[:2]] == ["rank 0", "rank 1"]
    bar, extremes, status = drawn(running(17), rows=60)
    # Rank r has done 1,200 of 2,400 x (1 + r): the mean of the shares is 1/2 x (1 + 1/2 + ... + 1/17) / 17 = 10.1 %.
    assert bar == (f"17 ranks  {'#' * 4}{'-' * 36}  10%  20,400/367,200  train/loss 10.50  20,400 samples/s  ETA 0:33")
    assert extremes == "slowest rank 16 on node 2% 1,200 samples/s | fastest rank 0 on node 50% 1,200 samples/s"
    assert status == "training | 1:05 | run-1"


def test_equal_progress_is_ordered_by_rate_and_then_by_rank() -> None:
    bars = fresh(17, ASCII_GLYPHS)
    for rank in range(17):
        bars.handle(output_api.RankStarted(rank, "node", 100 + rank))
        seconds = {3: 4, 5: 1}.get(rank, 2)  # for the same 100 of 200 steps
        for time_s, done in ((0, 0.0), (seconds, 100.0)):
            bars.handle(output_api.RankProgress(rank, Progress(time_s * 10**9, done, 200.0, "steps")))
    assert drawn(bars, 100)[1] == "slowest rank 3 on node 50% 25 steps/s | fastest rank 5 on node 50% 100 steps/s"


def test_states_of_a_group_are_counted() -> None:
    bars = fresh(20, ASCII_GLYPHS)
    for rank in range(18):
        bars.handle(output_api.RankStarted(rank, "node", 100 + rank))
    bars.handle(output_api.RankEnded(7, ok=False))
    bars.handle(output_api.RankEnded(8, ok=True))
    bars.handle(output_api.RankEnded(9, ok=False, stopped=True))
    assert drawn(bars)[1] == "2 waiting | 1 done | 1 stopped | 1 failed"
    assert bars.block(0.0, 100, 24)[1][0].colour == RED


def test_columns_do_not_shrink_so_that_bars_stay_in_place() -> None:
    bars = running(1)
    before = drawn(bars)[0].index("%")
    bars.handle(output_api.RankProgress(0, Progress(2 * 10**9, 1.0, 2400.0, "samples")))
    assert drawn(bars)[0].index("%") == before


def test_end_of_a_rank_is_shown() -> None:
    bars = running(2)
    bars.handle(output_api.RankEnded(0, ok=True))
    bars.handle(output_api.RankEnded(1, ok=False))
    assert drawn(bars)[0].endswith("done") and drawn(bars)[1].endswith("failed")


def test_new_start_of_a_rank_forgets_the_attempt_before() -> None:
    bars = running(1)
    bars.handle(output_api.RankStarted(0, "node", 7))
    assert "%" not in drawn(bars)[0] and "loss" not in drawn(bars)[0]


def test_progress_bar_of_a_rank_stands_below_its_own() -> None:
    bars = running(2)
    bars.handle(output_api.RedrawnLine(0, "\x1b[Aloading 10%"))
    assert drawn(bars)[1] == "  loading 10%"
    bars.handle(output_api.RedrawnLine(0, ""))
    assert len(drawn(bars)) == 3


def test_unknown_total_shows_what_is_known() -> None:
    bars = fresh(1, UNICODE_GLYPHS)
    bars.handle(output_api.RankProgress(0, Progress(0, 7.0, None, "steps")))
    assert drawn(bars)[0] == "rank 0    7  waiting"


def test_control_characters_in_names_are_removed() -> None:
    bars = running(1)
    bars.handle(output_api.DriverStatus("one\ntwo\x1b[2J"))
    bars.handle(output_api.RankProgress(0, Progress(2 * 10**9, 1300.0, 2400.0, "sam\x1b[2Jples")))
    assert not any("\x1b" in row or "\n" in row for row in drawn(bars))


def test_colours_tell_the_rank_and_how_it_ended() -> None:
    bars = running(4)
    gap = Piece("  ")
    middle = (gap, Piece("1,200/2,400"), gap, Piece("train/loss 2.500"), gap, Piece("1,200 samples/s"), gap)
    drawn_bar = (Piece("#" * 14, "36"), Piece("-" * 15, "2"))
    first = (Piece("rank 0", "36"), gap, *drawn_bar, gap, Piece("50%"), *middle)
    assert bars.block(65.0, 100, 24)[0] == (*first, Piece("ETA 0:01", "2"))
    for rank, (ok, stopped) in enumerate([(True, False), (False, False), (False, True)]):
        bars.handle(output_api.RankEnded(rank, ok, stopped))
    done, failed, stopped_row, _, status = bars.block(65.0, 100, 24)
    assert done == (*first, Piece("    done", "32"))
    assert [failed[0], failed[2], failed[3], failed[-1]] == [
        Piece("rank 1", "33"),
        Piece("#" * 7, "31"),
        Piece("-" * 22, "2"),
        Piece("  failed", "31"),
    ]
    assert [stopped_row[2].colour, stopped_row[-1]] == ["35", Piece(" stopped", "2")]
    assert status == (Piece("training | 1:05 | run-1", "2"),)


def test_group_is_red_once_a_rank_has_failed() -> None:
    bars = running(17)
    for colour, facts_colour in (("36", ""), ("31", "31")):
        bar, facts, _ = bars.block(65.0, 100, 24)
        assert [bar[0].colour, bar[2].colour, bar[3].colour, bar[-1]] == ["36", colour, "2", Piece("ETA 0:33", "2")]
        assert [piece.colour for piece in facts] == [facts_colour]
        bars.handle(output_api.RankEnded(0, ok=False))
    bars = running(3, all_ranks=True)
    bars.handle(output_api.RankEnded(2, ok=False))
    assert [bars.block(65.0, 100, 6)[1][0].colour, bars.block(65.0, 100, 4)[0][0].colour] == ["31", "31"]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (3, []),
        (4, ["3 ranks | 17% to 50% | 3,600 samples/s in all"]),
        (6, ["rank 0", "2 more ranks | 17% to 25% | 2,400 samples/s in all"]),
        (7, ["rank 0", "2 more ranks | 17% to 25% | 2,400 samples/s in all"]),
        (8, ["rank 0", "rank 1", "rank 2"]),
    ],
)
def test_small_terminal_has_a_bar_for_as_many_ranks_as_fit(rows: int, expected: list[str]) -> None:
    *shown, status = drawn(running(3), 100, rows)
    assert [row.split("  ")[0] for row in shown] == expected and status == "training | 1:05 | run-1"


def test_ranks_without_progress_and_room_are_only_counted() -> None:
    assert drawn(fresh(3, ASCII_GLYPHS), rows=4)[0] == "3 ranks | 3 waiting"


@pytest.mark.parametrize(("rows", "count"), [(3, 1), (4, 2), (5, 2), (6, 3)])
def test_group_takes_the_rows_that_there_are(rows: int, count: int) -> None:
    assert len(drawn(running(17), rows=rows)) == count


def test_bar_that_a_rank_draws_is_shown_where_all_have_room() -> None:
    bars = running(2)
    bars.handle(output_api.RedrawnLine(1, "loading 10%"))
    assert [row.split("  ")[0] for row in drawn(bars, rows=8)] == ["rank 0", "rank 1", "", "training | 1:05 | run-1"]
    assert drawn(bars, rows=8)[2] == "  loading 10%" and bars.block(0.0, 100, 8)[2][0].colour == "2"
    assert len(drawn(bars, rows=6)) == 3


def test_column_that_leaves_less_than_8_columns_for_the_bar_is_left_out() -> None:
    assert drawn(running(1), 66)[0] == "rank 0  ####----  50%  train/loss 2.500  1,200 samples/s  ETA 0:01"
    assert drawn(running(1), 65)[0] == f"rank 0  {'#' * 12}{'-' * 12}  50%  train/loss 2.500  ETA 0:01"


def test_columns_may_shrink_with_the_size_of_the_terminal() -> None:
    bars = running(1)
    assert "train/loss 2.500" in drawn(bars, 100)[0]
    bars.handle(output_api.RankStarted(0, "node", 7))
    assert drawn(bars, 100)[0].strip() == "rank 0"
    assert drawn(bars, 90)[0] == "rank 0  "  # without a bar: nothing is known


def test_done_rank_that_told_no_progress_has_a_full_bar() -> None:
    bars = fresh(1, ASCII_GLYPHS)
    assert drawn(bars)[0] == "rank 0    waiting"
    bars.handle(output_api.RankEnded(0, ok=True))
    assert drawn(bars)[0] == f"rank 0  {'#' * 40}     done"


def test_loss_of_training_comes_first_and_the_last_one_stays() -> None:
    bars = fresh(1, ASCII_GLYPHS)
    for values, shown in (
        ({"loss": 3.0}, "loss 3.000"),
        ({"loss": 3.0, "train/loss": 2.0}, "loss 2.000"),
        ({"lr": 0.1}, "loss 2.000"),
    ):
        bars.handle(output_api.RankMetrics(0, Metrics(0, values)))
        assert shown in drawn(bars)[0]


def test_total_and_loss_of_a_group_are_those_of_the_ranks_that_have_them() -> None:
    bars = running(17)
    bars.handle(output_api.RankProgress(3, Progress(2 * 10**9, 1300.0, None, "samples")))
    bars.handle(output_api.RankStarted(4, "", 7))
    bar, extremes, _ = drawn(bars, 120)
    # 16 ranks have told progress, 15 of them a total; the losses are 2.5 + r without that of rank 4.
    assert "  19,300  " in bar and "train/loss 10.75" in bar
    assert extremes.startswith("slowest rank 16 on node 2%") and extremes.endswith(
        "fastest rank 3 on node 1,300 1,001 samples/s"
    )
    for rank in range(17):
        bars.handle(output_api.RankEnded(rank, ok=True))
    assert "ETA" not in drawn(bars, 120)[0]


def test_group_of_which_one_rank_tells_progress_has_its_numbers() -> None:
    bars = fresh(17, ASCII_GLYPHS)
    for second in (0, 1):
        bars.handle(output_api.RankProgress(16, Progress(second * 10**9, second * 3.0, None, "steps")))
    bar, extremes, _ = drawn(bars)
    assert bar == "17 ranks    0%  3  3 steps/s"
    assert extremes == "slowest rank 16 3 3 steps/s | fastest rank 16 3 3 steps/s | 17 waiting"


@pytest.mark.parametrize(
    ("done", "shown"),
    [(7.0, "7"), (0.12345, "0.123"), (99.5, "99.5"), (100.4, "100"), (12345.0, "12,345"), (-100.5, "-100")],
)
def test_numbers_are_easy_to_read(done: float, shown: str) -> None:
    bars = fresh(1, ASCII_GLYPHS)
    bars.handle(output_api.RankProgress(0, Progress(0, done, None, "steps")))
    assert drawn(bars)[0] == f"rank 0    {shown}  waiting"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (59.9, "0:59"),
        (60.0, "1:00"),
        (3599.0, "59:59"),
        (3600.0, "1:00:00"),
        (7265.0, "2:01:05"),
        (1e300, "100000:00:00"),
    ],
)
def test_time_is_shown_as_on_a_clock(seconds: float, shown: str) -> None:
    ((piece,),) = Bars("", ASCII_GLYPHS).block(seconds, 80, 24)
    assert piece.text == shown


def test_long_unit_is_cropped() -> None:
    bars = fresh(1, ASCII_GLYPHS)
    for second in (0, 1):
        bars.handle(output_api.RankProgress(0, Progress(second * 10**9, second * 5.0, None, "abcde" * 10)))
    assert f"  5 {'abcde' * 4}/s  " in drawn(bars)[0]


def test_status_row_has_the_facts_that_fit_the_most_important_ones_first() -> None:
    bars = fresh(2, ASCII_GLYPHS)
    bars.handle(output_api.DriverStatus("starting 2 ranks on a local cluster"))
    assert drawn(bars)[-1] == "starting 2 ranks on a local cluster | 2 ranks to import torch | 1:05 | run-1"
    bars.handle(output_api.RankStarted(0, "node", 1))
    assert "1 rank to import torch" in drawn(bars)[-1]
    bars.handle(output_api.RankStarted(1, "node", 2))
    assert "the ranks connect" in drawn(bars)[-1]
    bars.handle(output_api.DriverStatus("training"))
    bars.handle(output_api.Epochs(12))
    bars.handle(output_api.RankMetrics(0, Metrics(0, {"val/loss": 0.5}, 384, 3)))
    bars.handle(output_api.RankMetrics(1, Metrics(0, {"val/loss": 0.52}, 384, 3)))
    bars.handle(output_api.Saved(256, time.time(), BestRecord("val/loss", "min", 0.509, 256)))
    assert drawn(bars)[-1] == (
        "training | 1:05 | epoch 3/12 | val/loss 0.51 (best 0.509, step 256) | saved step 256, 0 s ago | run-1"
    )
    assert drawn(bars, 60)[-1] == "training | 1:05 | epoch 3/12 | saved step 256, 0 s ago"
    bars.handle(output_api.RankStarted(0, "node", 3))
    assert "| 1 restart |" in drawn(bars)[-1] and "epoch" not in drawn(bars)[-1]
    bars.handle(output_api.DriverStatus("stopping (again: kills the ranks)"))
    assert drawn(bars, 60)[-1].startswith("stopping (again: kills the ranks) | 1:05")
