"""Rates, lines in a pipe, and rows below the log of a live display."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable

import pytest

from ddptrain.driver.display.facts import Pace
from ddptrain.driver.display.live import LiveRenderer
from ddptrain.driver.display.renderers import PlainRenderer
from ddptrain.driver.display.terminal import Stream
from ddptrain.protocol.events import Metrics, Progress
from ddptrain.results.log_tail import LogLine
from ddptrain.text_tables import columns_of
from tests.unit.driver.display.live_events import expect, numbers

# --- The rows below the log of a live display: ranks in lockstep have one, every fact fits the terminal ---


def drawn(rows: LiveRenderer, columns: int = 121, height: int = 24) -> list[str]:
    return [row.rstrip() for row in rows.frame(65.0, columns, height)[0].splitlines()]


def names(rows: LiveRenderer, height: int = 24) -> list[str]:
    return [row.split("  ")[0] for row in drawn(rows, height=height)[:-1]]


def live(*, all_ranks: bool = False) -> LiveRenderer:
    closed = Stream(None)
    return LiveRenderer(closed, closed, False, "petnames-20250101-120000-ab12", all_ranks=all_ranks)


def running(ranks: int, *, all_ranks: bool = False, host: str = "node", unit: str = "samples") -> LiveRenderer:
    """All ranks have done 1,200 of 2,400 in 1 s."""
    rows = live(all_ranks=all_ranks)
    rows.event(expect(ranks))
    rows.event({"event": "status", "message": "training"})
    for rank in range(ranks):
        rows.event({"event": "rank_started", "rank": rank, "host": host.format(rank), "pid": 100 + rank})
        for second in (0, 1):
            move(rows, rank, second, second * 1200.0, unit)
        rows.event(numbers(rank, Metrics(0, {"train/loss": 2.5 + rank, "lr": 0.1})))
    return rows


def move(rows: LiveRenderer, rank: int, second: float, done: float, unit: str = "samples") -> None:
    rows.event(numbers(rank, Progress(int(second * 1e9), done, 2400.0, unit)))


@pytest.mark.parametrize(
    ("unit", "count", "rate"), [("samples", "9,600/19,200", "9,600"), ("steps", "1,200/2,400", "1,200")]
)
def test_ranks_in_lockstep_share_a_row_that_sums_samples_but_not_steps(unit: str, count: str, rate: str) -> None:
    row, status = drawn(running(8, unit=unit))
    words = f"8 ranks {'━' * 20} 50% {count} train/loss 6.000 {rate} {unit}/s ETA 0:01"
    assert row.split() == words.split()
    assert status == "training · 1:05 · petnames-20250101-120000-ab12"


def test_rank_that_differs_or_has_failed_has_a_row_of_its_own() -> None:
    rows = running(8)
    for second in range(2, 30):
        for rank in range(8):
            move(rows, rank, second, 1200.0 + (1 if rank == 5 else 100) * (second - 1))
    assert names(rows) == ["7 ranks", "rank 5"]
    rows.event({"event": "rank_ended", "rank": 0, "ok": False})
    assert names(rows) == ["6 ranks", "rank 0", "rank 5"]
    assert drawn(rows)[1].endswith("failed")
    rows.event({"event": "rank_ended", "rank": 7, "ok": True})
    assert "1 done" in drawn(rows)[0]


def test_host_is_shown_where_there_are_several() -> None:
    assert names(running(2, host="node{}", all_ranks=True)) == ["rank 0 on node0", "rank 1 on node1"]


def test_no_row_is_wider_than_the_terminal() -> None:
    rows = running(3, host="node{}.example.com", all_ranks=True)
    rows.redrawn(1, "日本" * 100)
    for columns in range(2, 130):
        assert max(columns_of(row) for row in drawn(rows, columns)) < columns


def test_narrow_terminal_keeps_rank_percent_loss_and_time_left() -> None:
    assert drawn(running(1), 60)[0].split() == ["rank", "0", "50%", "train/loss", "2.500", "ETA", "0:01"]
    assert drawn(running(1), 16)[0].split() == ["rank", "0", "50%"]


def test_block_takes_half_of_the_terminal_at_most() -> None:
    rows = running(64, all_ranks=True)
    rows.redrawn(0, "10%")
    rows.event({"event": "rank_ended", "rank": 63, "ok": False})
    for height in (1, 2, 3, 12, 150):
        assert 1 <= len(drawn(rows, height=height)) <= max(height // 2, 1)
    assert names(rows, 12) == ["rank 0", "rank 1", "rank 2", "rank 3", "60 more ranks · 1 failed"]


def test_bar_that_a_rank_draws_itself_stands_below_and_a_new_start_forgets_all() -> None:
    rows = running(2)
    rows.redrawn(0, "\x1b[Aloading 10%")
    assert drawn(rows)[1] == "  loading 10%"
    rows.redrawn(0, "")
    assert len(drawn(rows)) == 2
    for rank in (0, 1):
        rows.event({"event": "rank_started", "rank": rank, "host": "node", "pid": 7})
    assert len(drawn(rows)) == 1


def test_control_characters_are_removed() -> None:
    rows = running(1)
    rows.event({"event": "status", "message": "one\ntwo\x1b[2J"})
    move(rows, 0, 2, 1300.0, "sam\x1b[2Jples")
    assert not any("\x1b" in row or "\n" in row for row in drawn(rows))


def test_status_row_has_the_facts_that_fit_the_most_important_ones_first() -> None:
    rows = live()
    rows.event(expect(2))
    rows.event({"event": "status", "message": "starting 2 ranks on a local cluster"})
    assert drawn(rows)[-1].startswith(
        "starting 2 ranks on a local cluster · waiting for 2 ranks to import torch · 1:05"
    )
    assert drawn(rows, 60)[-1] == "waiting for 2 ranks to import torch · 1:05 · ...ab12"
    for rank in (0, 1):
        rows.event({"event": "rank_started", "rank": rank, "host": "node", "pid": 1})
    assert "waiting for the ranks to connect" in drawn(rows)[-1]
    rows.event({"event": "status", "message": "training"})
    rows.event({"event": "epochs", "total": 12, "epoch": 3})
    rows.event(numbers(0, Metrics(0, {"val/loss": 0.51}, 384, 3)))
    best = {"metric": "val/loss", "mode": "min", "value": 0.509, "step": 256}
    rows.event({"event": "checkpoint_saved", "step": 256, "time_s": time.time(), "best": best})
    assert drawn(rows)[-1].startswith(
        "training · 1:05 · epoch 3/12 · val/loss 0.51 (best 0.509, step 256) · saved step 256, 0 s ago"
    )
    assert drawn(rows, 60)[-1] == "training · 1:05 · epoch 3/12 · val/loss 0.51 (best 0.509)"
    rows.event({"event": "rank_started", "rank": 0, "host": "node", "pid": 3})
    assert "· 1 restart ·" in drawn(rows)[-1] and "epoch" not in drawn(rows)[-1]


# --- In a pipe, a workload that only logs numbers is seen to advance ---


@pytest.fixture
def plain() -> tuple[PlainRenderer, Callable[[], list[str]]]:
    err = io.StringIO()
    renderer = PlainRenderer(Stream(io.StringIO()), Stream(err))

    def shown() -> list[str]:
        text = err.getvalue()
        err.seek(0)
        err.truncate()
        return text.splitlines()

    return renderer, shown


def test_line_after_each_minute_without_one_if_there_is_anything_new(
    plain: tuple[PlainRenderer, Callable[[], list[str]]],
) -> None:
    renderer, shown = plain
    renderer.refresh(0.0)
    for second in (0, 1):
        renderer.event(numbers(0, Progress(second * 10**9, 40.0 * second, 400.0, "images")))
    renderer.refresh(59.0)
    assert shown() == []
    renderer.refresh(60.0)
    assert shown() == ["ddptrain: 40 images, 40 images/s, ETA 0:09"]
    renderer.refresh(200.0)
    assert shown() == []  # nothing new
    renderer.event(numbers(0, Metrics(2 * 10**9, {"train/loss": 0.25}, 7)))
    renderer.log(0, [LogLine("a line")])
    renderer.refresh(201.0)
    renderer.refresh(260.0)
    assert shown() == []  # a minute after the line that a rank has printed
    renderer.refresh(261.0)
    assert shown() == ["ddptrain: step 7, train/loss 0.25, 40 images/s, ETA 0:09"]


def test_many_epochs_have_a_line_every_10_seconds(plain: tuple[PlainRenderer, Callable[[], list[str]]]) -> None:
    renderer, shown = plain
    for epoch in range(1, 1002):  # one each second
        renderer.event(numbers(0, Metrics(epoch * 10**9, {"loss": 1.0}, epoch, epoch)))
        renderer.refresh(float(epoch))
    lines = shown()
    assert lines[0].startswith("ddptrain: epoch 1, step 1, loss 1") and len(lines) == 100 + 90


def test_epoch_that_a_rank_has_printed_is_not_shown_again(
    plain: tuple[PlainRenderer, Callable[[], list[str]]],
) -> None:
    renderer, shown = plain
    for epoch in range(1, 5):
        renderer.event(numbers(0, Metrics(epoch * 10**9, {"loss": 1.0}, epoch, epoch - 0.5)))
        renderer.refresh(float(epoch))
        renderer.log(0, [LogLine(f"Epoch {epoch}: 1.0"), LogLine("something else")])
    renderer.event({"event": "rank_ended", "rank": 0, "ok": True})
    renderer.refresh(9.0)
    assert shown() == []


# --- The rate is smooth, and what is unknown is not invented ---


def pace_of(*points: tuple[float, float], total: float | None = 100.0) -> Pace:
    pace = Pace()
    for time_s, done in points:
        pace.update(Progress(int(time_s * 1e9), done, total, "samples"))
    return pace


def test_rate_follows_a_change_slowly() -> None:
    pace = pace_of((0, 0), (10, 100), (11, 120), total=1000)
    assert pace.rate == pytest.approx(11.81269)  # 10 + (1 - e^(-1/5)) * (20 - 10)


def test_progress_that_starts_again_starts_its_rate_again() -> None:
    assert pace_of((0, 0), (1, 50), (2, 0)).rate is None


@pytest.mark.parametrize("total", [0.0, -1.0, math.nan, math.inf])
def test_impossible_total_is_no_total(total: float) -> None:
    assert pace_of((0, 1), total=total).fraction is None


def test_impossible_done_is_left_out() -> None:
    assert pace_of((0, 10), (1, math.nan)).done == 10


def test_other_unit_starts_a_new_rate() -> None:
    pace = pace_of((0, 0), (1, 10))
    pace.update(Progress(2 * 10**9, 20.0, 100.0, "batches"))
    assert (pace.rate, pace.unit, pace.done) == (None, "batches", 20.0)
    pace.update(Progress(3 * 10**9, 25.0, 100.0, "batches"))
    assert pace.rate == 5.0
