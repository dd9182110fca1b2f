from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ddptrain.errors import UsageError
from ddptrain.results.compare.alignment import Alignment
from ddptrain.results.compare.comparison import changes, compare_runs, labels
from ddptrain.results.compare.text import comparison_text
from ddptrain.results.layout import RunLayout
from ddptrain.results.lookup import RunView
from ddptrain.results.run_record import BestRecord, RunRecord

Rows = list[tuple[int, dict[str, float | None]]]


def put(folder: Path, run_id: str, rows: Rows, **fields: Any) -> RunView:
    layout = RunLayout(folder / run_id)
    layout.root.mkdir()
    lines = [json.dumps({"time_s": step, "step": step, "rank": 0, **values}) for step, values in rows]
    layout.metrics_jsonl.write_text("".join(f"{line}\n" for line in lines))
    last = {name: value for _, values in rows for name, value in values.items()}
    record = RunRecord(run_id=run_id, status="succeeded", started_at="2025-01-01T00:00:00Z", last_metrics=last)
    return RunView(layout, dataclasses.replace(record, **fields))


@pytest.fixture
def views(tmp_path: Path) -> list[RunView]:
    one: Rows = [(1, {"val/loss": 3.0, "val/acc": 0.2}), (2, {"val/loss": 2.0, "val/acc": 0.5}), (3, {"val/loss": 2.5})]
    two: Rows = [(1, {"val/loss": 4.0, "val/acc": 0.1, "lr": 0.1}), (2, {"val/loss": 1.0, "val/acc": 0.4, "lr": 0.2})]
    return [put(tmp_path, "a-1", one, params={"layers": 1}), put(tmp_path, "b-1", two, params={"layers": 2})]


def test_last_and_best_values_with_the_winner(views: list[RunView]) -> None:
    found = {each.name: each for each in compare_runs(views).metrics}
    loss, accuracy, rate = found["val/loss"], found["val/acc"], found["lr"]
    assert (loss.goal, loss.last, loss.best, loss.winner) == ("min", (2.5, 1.0), (2.0, 1.0), 1)
    assert (accuracy.goal, accuracy.last, accuracy.best, accuracy.winner) == ("max", (0.5, 0.4), (0.5, 0.4), 0)
    assert (rate.goal, rate.last, rate.best, rate.winner) == ("", (None, 0.2), (None, None), None)


def test_the_mode_of_the_checkpoint_metric_decides(tmp_path: Path) -> None:
    rows: Rows = [(1, {"score/loss": 1.0}), (2, {"score/loss": 0.5})]
    views = [
        put(tmp_path, "a", rows, best=BestRecord("score/loss", "max", 1.5, 1)),  # as the checkpoint says
        put(tmp_path, "b", rows),
    ]
    (metric,) = compare_runs(views).metrics
    assert (metric.goal, metric.best, metric.winner) == ("max", (1.5, 1.0), 0)


def test_a_tie_has_no_winner(tmp_path: Path) -> None:
    views = [put(tmp_path, name, [(1, {"loss": 1.0})]) for name in "ab"]
    assert compare_runs(views).metrics[0].winner is None


def test_curves_of_the_losses_or_of_chosen_metrics(views: list[RunView]) -> None:
    (panel,) = compare_runs(views).plot.panels
    assert panel.quantity == "val/loss"
    assert [(curve.name, curve.main) for curve in panel.curves] == [
        ("A a-1", ([1, 2, 3], [3.0, 2.0, 2.5])),
        ("B b-1", ([1, 2], [4.0, 1.0])),
    ]
    plot = compare_runs(views, Alignment.TIME, ["lr", "val/acc"]).plot
    assert plot.x_name == "time_s"
    assert [[curve.name for curve in panel.curves] for panel in plot.panels] == [["B b-1"], ["A a-1", "B b-1"]]


def test_wrong_input(views: list[RunView]) -> None:
    with pytest.raises(UsageError, match=r"at least two different runs to compare, not only \w+"):
        compare_runs([views[0], views[0]])
    with pytest.raises(UsageError, match='none of the runs has logged "val/los"; did you mean val/loss'):
        compare_runs(views, None, ["val/los"])


def test_runs_without_metrics_are_compared(tmp_path: Path) -> None:
    found = compare_runs([put(tmp_path, name, [], params={"x": name}) for name in "ab"])
    assert found.differences["params"] == {"x": ["a", "b"]} and found.plot.panels == () and found.metrics == ()
    assert "params  A  B\n  x     a  b" in comparison_text(found)


def test_the_text(views: list[RunView]) -> None:
    (views[1].layout.root / "annotations.json").write_text('{"tags": ["good"], "note": "\\u001b[31mred"}')
    text = comparison_text(compare_runs(views))
    assert "params    A  B\n  layers  1  2\n\nno differences, or not recorded: config, code, data" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["val/loss", "last", "2.5", "1", "(-1.5)"] in rows and ["best", "(min)", "2", "1", "(-1)", "*"] in rows
    assert ["best", "(max)", "0.5", "*", "0.4", "(-0.1)"] in rows and ["lr", "last", "-", "0.2"] in rows
    assert rows[0][-2:] == ["TAGS", "NOTE"] and rows[2][-2:] == ["good", "\\u001b[31mred"]


def test_json_has_everything(views: list[RunView]) -> None:
    data = compare_runs(views).as_dict()
    loss = next(each for each in data["metrics"] if each["name"] == "val/loss")
    assert loss["best_difference"] == (0.0, -1.0) and loss["winner"] == "b-1"
    assert data["x"] == "step" and data["series"][0] == {
        "name": "val/loss",
        "run": "a-1",
        "x": [1, 2, 3],
        "y": [3.0, 2.0, 2.5],
    }
    assert [run["run_id"] for run in data["runs"]] == ["a-1", "b-1"]


def test_differences_need_both_values() -> None:
    assert changes((1.0, None, 3.0)) == (0.0, None, 2.0)
    assert changes((None, 2.0)) == (None, None)


def test_labels_are_letters(views: list[RunView]) -> None:
    found = labels(views * 14)
    assert (found[0], found[25], found[26], found[27]) == ("A", "Z", "AA", "AB")


def test_sections_have_at_most_60_rows_and_say_how_many_are_missing(tmp_path: Path) -> None:
    def text(count: int) -> list[str]:
        folder = tmp_path / str(count)
        folder.mkdir()
        rows: Rows = [(1, {f"m{number:02}": 1.0 for number in range(count)})]
        params = {f"p{number:02}": 1 for number in range(count)}
        first, second = (put(folder, name, rows, params=params) for name in "ab")
        second = dataclasses.replace(second, record=dataclasses.replace(second.record, params={}))
        return comparison_text(compare_runs([first, second])).splitlines()

    lines = text(60)
    assert sum(line.startswith("  p") for line in lines) == 60 and sum(line.startswith("  m") for line in lines) == 60
    assert "see --json" not in "".join(lines)
    lines = text(62)
    assert sum(line.startswith("  p") for line in lines) == 60 and sum(line.startswith("  m") for line in lines) == 60
    assert [line for line in lines if "see --json" in line] == [
        "  and 2 more differences: see --json",
        "  and 2 more metrics: see --json",
    ]


def test_long_values_and_notes_are_cut(tmp_path: Path) -> None:
    views = [put(tmp_path, name, [], params={"x": name * 33, "y": name * 32}) for name in "ab"]
    (views[0].layout.root / "annotations.json").write_text(json.dumps({"note": "n" * 61}))
    (views[1].layout.root / "annotations.json").write_text(json.dumps({"note": "n" * 60}))
    lines = comparison_text(compare_runs(views)).splitlines()
    assert (lines[0].split()[-1], lines[1].split()[-1], lines[2].split()[-1]) == ("NOTE", "n" * 57 + "...", "n" * 60)
    assert [line.split() for line in lines if line.startswith("  ")][1:] == [
        ["x", "a" * 29 + "...", "b" * 29 + "..."],
        ["y", "a" * 32, "b" * 32],
    ]


def test_without_a_loss_the_first_six_metrics_are_drawn(tmp_path: Path) -> None:
    rows: Rows = [(1, {f"m{number}": 1.0 for number in range(8)})]
    plot = compare_runs([put(tmp_path, name, rows) for name in "ab"]).plot
    assert [panel.quantity for panel in plot.panels] == ["m0", "m1", "m2", "m3", "m4", "m5"]
    assert (plot.run_id, plot.status, plot.x_name) == ("2 runs", "by step", "step")


def test_best_metric_of_a_checkpoint_is_compared_even_if_nobody_logged_it(tmp_path: Path) -> None:
    views = [
        put(tmp_path, name, [], best=BestRecord("score", "max", value, 1)) for name, value in (("a", 1.0), ("b", 2.0))
    ]
    (metric,) = compare_runs(views).metrics
    assert (metric.name, metric.goal, metric.last, metric.best, metric.winner) == (
        "score",
        "max",
        (None, None),
        (1.0, 2.0),
        1,
    )


def test_last_value_that_is_not_finite_is_shown_as_nan(tmp_path: Path) -> None:
    views = [put(tmp_path, name, [(1, {"x": value})]) for name, value in (("a", 1.0), ("b", None))]
    (row,) = [line for line in comparison_text(compare_runs(views)).splitlines() if line.startswith("  x ")]
    assert row.split() == ["x", "last", "1", "nan"]
