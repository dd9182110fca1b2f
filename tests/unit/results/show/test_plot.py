from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from ddptrain.errors import UsageError
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView
from ddptrain.results.run_record import BestRecord, RunRecord
from ddptrain.results.show import plot as plot_module
from ddptrain.results.show.chart import Style
from ddptrain.results.show.curves import Curve, Panel, Plot, plot_of
from ddptrain.results.show.plot import save_picture, terminal_charts

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def plot(tmp_path: Path) -> Plot:
    layout = RunLayout(tmp_path)
    lines = [
        {
            "time_s": 0,
            "rank": rank,
            "step": step,
            "train/loss": 3 / step + rank,
            "val/$x$_loss": None if step == 2 else step,
        }
        for step in (1, 2, 3)
        for rank in (0, 1)
    ]
    layout.metrics_jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return plot_of(RunView(layout, RunRecord(run_id="a_$run", status="failed")))


def test_a_picture_is_written_whole(plot: Plot, tmp_path: Path) -> None:
    out = tmp_path / "plot.png"
    save_picture(plot, out, BestRecord("train/loss", "min", 1.0, 3))
    assert out.read_bytes().startswith(PNG)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_the_ending_decides_the_format(plot: Plot, tmp_path: Path) -> None:
    save_picture(plot, tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "<svg" in drawn and "<!-- a_$run  ·  failed -->" in drawn  # each text is a comment, too
    save_picture(plot, tmp_path / "a")
    assert (tmp_path / "a").read_bytes().startswith(PNG)
    with pytest.raises(UsageError, match=r"cannot draw a \.docx file"):
        save_picture(plot, tmp_path / "a.docx")


def test_a_folder_that_is_not_there_is_named(plot: Plot, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no/a\.png: No such file or directory; choose another file with --out"):
        save_picture(plot, tmp_path / "no" / "a.png")


def test_charts_name_each_curve_with_its_last_value(plot: Plot) -> None:
    text = terminal_charts(plot, Style())
    assert "train/loss, mean of 2 ranks: 1.5" in text
    assert "val/$x$_loss: 3" in text


@pytest.mark.parametrize(("points", "marker"), [(1, "o"), (40, "o"), (41, "")])
def test_points_of_short_curves_are_marked(points: int, marker: str) -> None:
    drawn: list[dict[str, Any]] = []

    class Axis(MagicMock):
        def plot(self, *data: Any, **style: Any) -> None:
            drawn.append({"data": data, **style})

    x = [float(number) for number in range(points)]
    curve = Curve("a", {0: (x, x), 1: (x, x)}, (x, x))
    plot_module._draw_panel(Axis(), Panel("q", (curve,)), BestRecord("a", "min", 1.25, 3), "step")
    faint, other, main, best = drawn
    assert faint["alpha"] == other["alpha"] == 0.28 and faint["linewidth"] == 0.9
    assert (main["marker"], main["linewidth"], main["markersize"], main["label"]) == (marker, 1.9, 3.5, curve.label)
    assert best["data"] == ([3], [1.25]) and best["label"] == "best: 1.25 at step 3" and best["marker"] == "*"
    drawn.clear()
    plot_module._draw_panel(Axis(), Panel("q", (curve,)), BestRecord("a", "min", 1.25, 3), "epoch")
    assert len(drawn) == 3
