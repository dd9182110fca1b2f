from __future__ import annotations

import dataclasses
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
from ddptrain.results.show.curves import Curve, Panel, Plot, plot_of
from ddptrain.results.show.plot import Style, save_picture, terminal_charts

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


@pytest.mark.filterwarnings("error")
def test_name_that_the_font_lacks_gives_no_warning(plot: Plot, tmp_path: Path) -> None:
    save_picture(dataclasses.replace(plot, run_id="名前"), tmp_path / "plot.png")


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


def test_picture_has_a_title_and_a_panel_for_each_quantity(
    plot: Plot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[MagicMock] = []
    axes = [MagicMock(), MagicMock()]

    def make(**options: object) -> MagicMock:
        figure = MagicMock()
        figure.options = options
        figure.subplots.return_value.__getitem__.return_value = axes
        figures.append(figure)
        return figure

    monkeypatch.setattr("matplotlib.figure.Figure", make)
    monkeypatch.setattr("matplotlib.backends.backend_agg.FigureCanvasAgg", MagicMock())
    save_picture(plot, tmp_path / "a.PDF")
    (figure,) = figures
    assert figure.options == {"figsize": (9, pytest.approx(8.8)), "dpi": 130, "layout": "constrained"}
    figure.suptitle.assert_called_once_with(r"a_\$run  ·  failed", fontsize=12)
    figure.subplots.assert_called_once_with(2, 1, squeeze=False, sharex=True)
    assert figure.savefig.call_args.kwargs == {"format": "pdf"}
    assert [axis.set_ylabel.call_args.args for axis in axes] == [("loss",), (r"\$x\$_loss",)]
    axes[1].set_xlabel.assert_called_once_with("step")
    axes[0].set_xlabel.assert_not_called()
    axes[0].grid.assert_called_once_with(visible=True, color="#d8dce0", linewidth=0.6)
    axes[0].spines.__getitem__.return_value.set_visible.assert_called_once_with(False)
    axes[0].margins.assert_called_once_with(x=0.02)
    axes[0].legend.assert_called_once_with(frameon=False, fontsize=9)


def test_seventh_curve_has_the_colour_of_the_first() -> None:
    axis = MagicMock()
    curves = tuple(Curve(str(number), {0: ([1.0], [1.0])}, ([1.0], [1.0])) for number in range(7))
    plot_module._draw_panel(axis, Panel("q", curves), None, "step")
    colours = [call.kwargs["color"] for call in axis.plot.call_args_list]
    assert colours[:2] == ["#1f6fb4", "#d9570f"] and colours[6] == colours[0] and len(set(colours)) == 6


def test_legend_of_a_chart_has_the_last_number_that_is_known(plot: Plot) -> None:
    nan = float("nan")
    curves = (
        Curve("a", {0: ([1.0, 2.0], [1.23456, nan])}, ([1.0, 2.0], [1.23456, nan])),
        Curve("b", {}, ([1.0], [nan])),
    )
    text = terminal_charts(Plot("r", "failed", "time_s", (Panel("q", curves), Panel("p\n", curves[:1]))), Style())
    first, second = text.split("\n\n")
    assert first.split("\n")[0] == "q" and first.split("\n")[-2:] == ["** a: 1.235", "oo b"]
    assert second.split("\n")[0] == "p\N{REPLACEMENT CHARACTER}" and "seconds" in second
