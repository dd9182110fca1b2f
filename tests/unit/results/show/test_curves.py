"""Curves, charts and pictures of metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddptrain.errors import UsageError
from ddptrain.results.run import Run
from ddptrain.results.run_record import AttemptRecord, RunRecord
from ddptrain.results.show.curves import Curve, Panel, Plot, Style, plot_data, plot_of, terminal_charts

# --- curves ---


def view_of(root: Path, *lines: Mapping[str, object], status: str = "succeeded") -> Run:
    layout = Run(root)
    layout.metrics_jsonl.write_text("".join(json.dumps({"time_s": 0, "rank": 0, **line}) + "\n" for line in lines))
    return Run(layout.root, RunRecord(run_id="r", status=status))


def test_losses_share_a_panel_and_other_metrics_wait_to_be_asked_for(tmp_path: Path) -> None:
    view = view_of(tmp_path, {"step": 1, "train/loss": 2, "val/loss": 3, "lr": 0.1})
    (panel,) = plot_of(view).panels
    assert [curve.name for curve in panel.curves] == ["train/loss", "val/loss"]
    assert [panel.quantity for panel in plot_of(view, ["lr", "val/loss", "lr"]).panels] == ["lr", "loss"]


def test_ranks_that_differ_have_a_mean_and_ranks_that_agree_are_one(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [
        {"rank": rank, "step": step, "train/loss": step + rank, "val/loss": step} for step in (1, 2) for rank in (0, 1)
    ]
    train, val = plot_of(view_of(tmp_path, *lines)).panels[0].curves
    assert train.main == ([1.0, 2.0], [1.5, 2.5])
    assert (train.label, val.label) == ("train/loss, mean of 2 ranks", "val/loss")
    assert val.main == ([1.0, 2.0], [1.0, 2.0])
    rows = plot_data(plot_of(view_of(tmp_path, *lines)))
    assert [(row["name"], row["rank"]) for row in rows] == [
        ("train/loss", 0),
        ("train/loss", 1),
        ("train/loss", "mean"),
        ("val/loss", 0),
    ]


def test_a_rank_that_stopped_early_leaves_the_mean_to_the_others(tmp_path: Path) -> None:
    view = view_of(
        tmp_path,
        {"step": 1, "loss": 1},
        {"rank": 1, "step": 1, "loss": 3},
        {"step": 2, "loss": 5},
        {"rank": 1, "step": 3, "loss": None},
    )
    (curve,) = plot_of(view).panels[0].curves
    assert curve.main[0] == [1.0, 2.0, 3.0]
    assert curve.main[1][:2] == [2.0, 5.0] and math.isnan(curve.main[1][2])


def test_curve_of_a_resumed_run_does_not_run_backwards(tmp_path: Path) -> None:
    steps = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4)]
    view = view_of(tmp_path, *({"step": step, "attempt": attempt, "loss": attempt} for attempt, step in steps))
    record = replace(view.record, attempts=(AttemptRecord(1), AttemptRecord(2, resumed_from=2)))
    (curve,) = plot_of(Run(view.root, record)).panels[0].curves
    assert curve.main == ([1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("lines", "x_name", "x"),
    [
        (({"step": 5, "epoch": 1, "loss": 1},), "step", [5.0]),
        (({"step": 5, "epoch": 1, "loss": 1}, {"epoch": 2, "val/loss": 1}), "epoch", [1.0]),
        (({"time_s": 10, "loss": 1}, {"time_s": 12, "loss": 1}), "time_s", [0.0, 2.0]),
    ],
)
def test_x_is_the_first_position_that_every_point_has(
    tmp_path: Path, lines: tuple[dict[str, object], ...], x_name: str, x: list[float]
) -> None:
    plot = plot_of(view_of(tmp_path, *lines))
    assert plot.x_name == x_name
    assert plot.panels[0].curves[0].main[0] == x


def test_an_unknown_metric_suggests_a_known_one(tmp_path: Path) -> None:
    view = view_of(tmp_path, {"step": 1, "train/loss": 2})
    with pytest.raises(UsageError, match='no metric "train/los"; did you mean train/loss'):
        plot_of(view, ["train/los"])


def test_a_run_without_metrics_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="r has logged no metrics; it is still running: try again later"):
        plot_of(view_of(tmp_path, status="running"))


def test_long_curves_are_thinned_to_means(tmp_path: Path) -> None:
    view = view_of(tmp_path, *({"step": step, "loss": step % 2} for step in range(10_000)))
    (curve,) = plot_of(view).panels[0].curves
    assert len(curve.main[0]) == 2000
    assert all(0 < value < 1 for value in curve.main[1])


def test_system_metrics_are_drawn_if_they_are_asked_for(tmp_path: Path) -> None:
    view = view_of(tmp_path, {"step": 1, "loss": 2})
    use = [{"time_s": at_s, "host": "h", "rank": 0, "cpu_percent": at_s} for at_s in (5.0, 7.0)]
    view.system_jsonl.write_text("".join(f"{json.dumps(each)}\n" for each in use))
    assert [panel.quantity for panel in plot_of(view).panels] == ["loss"]
    drawn = plot_of(view, ["system/cpu_percent"])
    assert (drawn.x_name, drawn.panels[0].curves[0].main) == ("time_s", ([0.0, 2.0], [5.0, 7.0]))
    with pytest.raises(UsageError, match='no metric "system/gpu"'):
        plot_of(view, ["system/gpu"])


# --- chart ---


def drawn(style: Style, *lines: list[tuple[float, float]]) -> list[str]:
    curves = [Curve(f"m{at}", {}, ([x for x, _ in line], [y for _, y in line])) for at, line in enumerate(lines)]
    return terminal_charts(Plot("r", "", "step", (Panel("m", tuple(curves)),)), style).split("\n")


def test_a_gap_interrupts_the_line() -> None:
    rows = drawn(Style(60), [(0, 1), (1, 1), (2, math.nan), (3, 1), (4, 1)])
    (row,) = [row for row in rows[1:-1] if "*" in row]
    assert len(row.partition("|")[2].split()) == 2


@given(
    st.lists(st.tuples(st.floats(), st.floats()), max_size=30),
    st.integers(0, 200),
    st.integers(0, 60),
    st.booleans(),
)
def test_any_numbers_make_a_chart_that_fits(
    points: list[tuple[float, float]], width: int, height: int, unicode: bool
) -> None:
    assert all(len(row) <= max(40, width) for row in drawn(Style(width, height, unicode), points))
