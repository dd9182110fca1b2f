"""Sparklines, and the text of charts."""

from __future__ import annotations

import math
import re

import pytest
from markdown_it import MarkdownIt

from ddptrain.reports.markdown import charts, sparkline
from ddptrain.results.show.curves import Curve, Panel, Plot


def curve(name: str, x: list[float], y: list[float]) -> Curve:
    return Curve(name, {0: (x, y)}, (x, y))


def drawn(*panels: tuple[str, list[Curve]], x_name: str = "step") -> list[str]:
    return charts(Plot("r", "succeeded", x_name, tuple(Panel(name, tuple(curves)) for name, curves in panels)))


def points(text: str) -> list[list[float]]:
    return [[float(value) for value in line.split(",")] for line in re.findall(r"line \[(.*)\]", text)]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], "▁▂▃▄▅▆▇█"),
        ([1.0, math.nan, 0.0, math.inf], "█▁"),
        ([2.0, 2.0, 2.0], "▁▁▁"),
        ([1.0], ""),
        ([math.nan, math.nan], ""),
        ([-1e308, 1e308], "▁▁"),  # the range is not finite
        ([float(value) for value in range(48)], "▁▁▂▂▂▃▃▃▃▄▄▄▅▅▅▆▆▆▆▇▇▇██"),
    ],
)
def test_sparkline(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_chart_has_a_legend_and_the_values() -> None:
    (text,) = drawn(("loss", [curve("train/loss", [0.0, 1.0, 2.0], [3.0, 2.0, 1.0])]))
    legend, _, *block = text.splitlines()
    assert legend == "🔵 `train/loss`"
    assert (block[0], block[2], block[-1]) == ("```mermaid", "xychart-beta", "```")
    assert block[3:6] == ['  x-axis "step" 0 --> 2', '  y-axis "loss" 0.9 --> 3.1', "  line [3, 2, 1]"]


def test_curves_share_a_chart_in_their_common_range() -> None:
    train = curve("train/loss", [float(x) for x in range(11)], [10.0 - x for x in range(11)])
    val = curve("val/loss", [4.0, 7.0, 10.0], [8.0, 5.0, 2.0])
    (text,) = drawn(("loss", [train, val]))
    assert 'x-axis "step" 4 --> 10' in text
    assert text.startswith("🔵 `train/loss` 🟠 `val/loss`\n")
    assert points(text) == [[6, 5, 4, 3, 2, 1, 0], [8, 5, 2]]


def test_curves_that_overlap_little_have_charts_of_their_own() -> None:
    first, second = curve("a/loss", [0.0, 10.0], [1.0, 2.0]), curve("b/loss", [9.0, 20.0], [1.0, 2.0])
    assert ["🔵 `a/loss`" in text for text in drawn(("loss", [first, second]))] == [True, False]


def test_long_curves_are_thinned_to_means() -> None:
    (text,) = drawn(("loss", [curve("loss", [float(x) for x in range(6000)], [float(x % 2) for x in range(6000)])]))
    ((*values,),) = points(text)
    assert len(values) == 60
    assert set(values) == {0.5}
    assert len(text) < 5000


def test_small_numbers_have_no_exponent() -> None:
    (text,) = drawn(("lr", [curve("lr", [1e9, 2e9], [1e-7, 2e-9])]), x_name="time_s")
    assert 'x-axis "seconds" 1000000000 --> 2000000000' in text
    assert not re.search(r"\de[-+]?\d", text)
    assert points(text) == [[1e-7, 2e-9]]


@pytest.mark.parametrize(
    "points_of",
    [([], []), ([1.0], [1.0]), ([1.0, 1.0], [1.0, 2.0]), ([0.0, 1.0], [math.nan, 1.0]), ([0.0, 1.0], [1e40, 0.0])],
)
def test_curves_that_cannot_be_drawn_have_no_chart(points_of: tuple[list[float], list[float]]) -> None:
    assert drawn(("loss", [curve("loss", *points_of)])) == []


def test_losses_come_first_and_charts_are_few() -> None:
    names = ["a/b", "a/c", "a/d", "a/e", "accuracy", "loss"]
    texts = drawn(*((name, [curve(name, [0.0, 1.0], [1.0, 1.0])]) for name in names))
    assert [text.splitlines()[0] for text in texts] == ["🔵 `loss`", "🔵 `a/b`", "🔵 `a/c`", "🔵 `a/d`"]


def test_metrics_of_no_data_set_have_charts_if_there_are_no_others() -> None:
    lr, loss = ((name, [curve(name, [0.0, 1.0], [1.0, 1.0])]) for name in ("lr", "loss"))
    assert len(drawn(lr, loss)) == 1
    assert "`lr`" in drawn(lr)[0]


def test_names_cannot_end_the_chart() -> None:
    name = 'x"\n```\n# hi `;%%'
    (text,) = drawn((name, [curve(name, [0.0, 1.0], [1.0, 1.0])]))
    blocks = [token for token in MarkdownIt().parse(text) if token.type == "fence"]
    assert [block.info for block in blocks] == ["mermaid"]
    (title,) = [line for line in blocks[0].content.splitlines() if "y-axis" in line]
    assert title.count('"') == 2
    assert not re.search("[`#;\n]", title)
