"""JSON lines: the object of each message, with known values."""

from __future__ import annotations

import json
import math
from typing import Any
from unittest.mock import ANY

import pytest

from ddptrain.driver.display import output_api
from ddptrain.driver.display.jsonl import JsonRenderer
from ddptrain.driver.display.log_tail import RankLine
from ddptrain.protocol.events import Metrics, Progress


class Text:
    """A stream that keeps what is written."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


class Bench:
    """A renderer, and what it has written."""

    def __init__(self, stage: str = "") -> None:
        self.out, self.err = Text(), Text()
        self.renderer = JsonRenderer(self.out, self.err, stage)  # type: ignore[arg-type]

    @property
    def objects(self) -> list[dict[str, Any]]:
        found = [json.loads(line, parse_constant=pytest.fail) for line in self.out.text.splitlines()]
        self.out.text = ""
        assert all(round(each.get("time_s", 0), 3) == each.get("time_s", 0) for each in found)
        return found


METRICS = Metrics(2_500_000_000, {"loss": math.nan, "acc": 0.5}, 3, 1.5)


@pytest.mark.parametrize(
    ("message", "objects"),
    [
        (
            output_api.RankMetrics(2, METRICS),
            [
                {
                    "event": "metrics",
                    "rank": 2,
                    "time_s": 2.5,
                    "step": 3,
                    "epoch": 1.5,
                    "values": {"loss": None, "acc": 0.5},
                }
            ],
        ),
        (
            output_api.RankStarted(2, "h", 77),
            [{"event": "rank_started", "rank": 2, "time_s": ANY, "host": "h", "pid": 77}],
        ),
        (
            output_api.RankEnded(2, False, True),
            [{"event": "rank_ended", "rank": 2, "time_s": ANY, "ok": False}],
        ),
        (
            output_api.DriverNotice("careful", "warning"),
            [{"event": "notice", "time_s": ANY, "level": "warning", "message": "careful"}],
        ),
        (output_api.DriverStatus("training"), [{"event": "status", "time_s": ANY, "message": "training"}]),
        (output_api.DriverStatus(""), []),
        (
            output_api.RedrawnLine(2, "50%"),
            [{"event": "log", "rank": 2, "time_s": ANY, "line": "50%", "partial": True}],
        ),
        (output_api.RedrawnLine(2, ""), []),
        (output_api.WorldSize(4), []),
        (
            output_api.RawEvent({"event": "x", "deep": {1: [math.inf, (1.0, -math.inf)]}}),
            [{"event": "x", "deep": {"1": [None, [1.0, None]]}}],
        ),
        (output_api.Closing(("lines",), {"event": "end"}), [{"event": "end"}]),
        (output_api.Closing(("lines",), {}), []),
    ],
)
def test_message_is_an_object(message: output_api.Message, objects: list[dict[str, Any]]) -> None:
    bench, staged = Bench(), Bench("evaluate")
    bench.renderer.handle(message)
    staged.renderer.handle(message)
    assert bench.objects == objects
    assert staged.objects == [{**each, "stage": "evaluate"} for each in objects]
    assert bench.err.text == ""


def test_own_log_goes_to_stderr() -> None:
    bench = Bench()
    bench.renderer.handle(output_api.LogLine("decided"))
    assert (bench.out.text, bench.err.text) == ("", "decided\n")


def test_each_line_of_each_rank_is_an_object() -> None:
    bench = Bench("evaluate")
    bench.renderer.log([0, 3], [RankLine('a "b"', True), RankLine("c", False)])
    about = {"event": "log", "stage": "evaluate", "time_s": ANY}
    assert bench.objects == [
        {**about, "rank": rank, **line}
        for rank in (0, 3)
        for line in ({"line": 'a "b"'}, {"line": "c", "partial": True})
    ]


def progress(done: float) -> output_api.RankProgress:
    return output_api.RankProgress(1, Progress(3_500_000_000, done, 100.0, "samples"))


def test_progress_is_written_at_most_once_a_second_and_its_last_state_always() -> None:
    bench = Bench()
    expected = {"event": "progress", "rank": 1, "time_s": 3.5, "total": 100.0, "unit": "samples"}
    for now_s, done, written in ((10.0, 1.0, [1.0]), (10.5, 2.0, []), (10.99, 3.0, []), (11.0, 4.0, [4.0])):
        bench.renderer.handle(progress(done))
        bench.renderer.refresh(now_s)
        assert bench.objects == [{**expected, "done": each} for each in written]
        bench.renderer.refresh(now_s)  # each state is written once
        assert bench.objects == []
    bench.renderer.handle(progress(5.0))
    bench.renderer.handle(output_api.Closing((), {"event": "end"}))
    assert bench.objects == [{**expected, "done": 5.0}, {"event": "end"}]
