from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ddptrain.errors import UsageError
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView
from ddptrain.results.run_record import BestRecord, RunRecord
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
