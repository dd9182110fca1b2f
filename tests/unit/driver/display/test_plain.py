"""In a pipe, a workload that only logs numbers is seen to advance."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from ddptrain.driver.display import output_api
from ddptrain.driver.display.log_tail import RankLine
from ddptrain.driver.display.output_stream import Stream
from ddptrain.driver.display.plain import PlainRenderer
from ddptrain.protocol.events import Metrics, Progress


@pytest.fixture
def plain() -> tuple[PlainRenderer, Callable[[], list[str]]]:
    err = io.StringIO()
    renderer = PlainRenderer(Stream(io.StringIO(), lambda: False), Stream(err, lambda: False), colour=False)

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
        renderer.handle(output_api.RankProgress(0, Progress(second * 10**9, 40.0 * second, 400.0, "images")))
    renderer.refresh(59.0)
    assert shown() == []
    renderer.refresh(60.0)
    assert shown() == ["ddptrain: 40 images, 40 images/s, ETA 0:09"]
    renderer.refresh(200.0)
    assert shown() == []  # nothing new
    renderer.handle(output_api.RankMetrics(0, Metrics(2 * 10**9, {"train/loss": 0.25}, 7)))
    renderer.log([0], [RankLine("a line")])
    renderer.refresh(201.0)
    renderer.refresh(260.0)
    assert shown() == []  # a minute after the line that a rank has printed
    renderer.refresh(261.0)
    assert shown() == ["ddptrain: step 7, train/loss 0.25, 40 images/s, ETA 0:09"]


def test_many_epochs_have_a_line_every_10_seconds(plain: tuple[PlainRenderer, Callable[[], list[str]]]) -> None:
    renderer, shown = plain
    for epoch in range(1, 1002):  # one each second
        renderer.handle(output_api.RankMetrics(0, Metrics(epoch * 10**9, {"loss": 1.0}, epoch, epoch)))
        renderer.refresh(float(epoch))
    lines = shown()
    assert lines[0].startswith("ddptrain: epoch 1, step 1, loss 1") and len(lines) == 100 + 90


def test_epoch_that_a_rank_has_printed_is_not_shown_again(
    plain: tuple[PlainRenderer, Callable[[], list[str]]],
) -> None:
    renderer, shown = plain
    for epoch in range(1, 5):
        renderer.handle(output_api.RankMetrics(0, Metrics(epoch * 10**9, {"loss": 1.0}, epoch, epoch - 0.5)))
        renderer.refresh(float(epoch))
        renderer.log([0], [RankLine(f"Epoch {epoch}: 1.0"), RankLine("something else")])
    renderer.handle(output_api.RankEnded(0, ok=True))
    renderer.refresh(9.0)
    assert shown() == []


def test_line_of_an_epoch_has_no_values_of_the_next(plain: tuple[PlainRenderer, Callable[[], list[str]]]) -> None:
    renderer, shown = plain
    for rank, epoch, loss in ((0, 1, 0.5), (1, 1, 0.7), (1, 2, 9.0), (0, 2, 0.3), (0, 3, 0.2)):
        event = Metrics(epoch * 10**9, {"loss": loss}, epoch, epoch)
        renderer.handle(output_api.RankMetrics(rank, event))
        renderer.refresh(float(epoch))
    first, second = shown()
    assert "epoch 1, step 1, loss 0.6" in first
    assert "epoch 2, step 2, loss 4.65" in second
