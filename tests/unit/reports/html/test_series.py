"""Curves keep their extremes, their mean is that of the ranks, and their number is bounded."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ddptrain.reports.html.series import MEAN, Line, page_data, read_lines, summaries, thinned
from ddptrain.results.lookup import RunView
from tests.unit.reports.runs import run


def line(values: list[float]) -> Line:
    x = np.arange(len(values), dtype=np.float64)
    return Line("a", MEAN, x, x, x, np.array(values))


def view_with(folder: Path, *records: Mapping[str, object]) -> RunView:
    view = run(folder, started_at="1970-01-01T00:00:10Z")
    view.layout.metrics_jsonl.write_text("".join(json.dumps(record) + "\n" for record in records))
    return view


def test_extremes_of_every_part_stay() -> None:
    found = thinned(line([0, 9, 1, 2, 3, -7, 4, 5, 6, 7]), 6)
    assert found.step.tolist() == [0, 1, 5, 9]
    assert found.value.tolist() == [0, 9, -7, 7]


def test_one_peak_among_a_million_points_stays() -> None:
    values = np.zeros(1_000_000)
    values[123_457], values[777_777] = 5.0, -3.0
    found = thinned(line(values.tolist()), 500)
    assert len(found.value) <= 500
    assert (found.value.max(), found.value.min()) == (5.0, -3.0)
    assert found.step[found.value == 5.0].tolist() == [123_457]


def test_missing_values_stay_visible() -> None:
    values = [float(at) for at in range(100)]
    values[50] = float("nan")
    found = thinned(line(values), 20)
    assert found.step[np.isnan(found.value)].tolist() == [50]
    assert np.isnan(thinned(line([float("nan")] * 100), 20).value).all()


def test_short_line_stays_as_it_is() -> None:
    one = line([3, 1, 2])
    assert thinned(one, 2) is one


def test_mean_of_ranks_is_taken_at_each_step(tmp_path: Path) -> None:
    view = view_with(
        tmp_path,
        {"time_s": 11, "step": 1, "rank": 0, "loss": 1.0},
        {"time_s": 12, "step": 1, "rank": 1, "loss": 3.0},
        {"time_s": 13, "step": 2, "rank": 0, "loss": 5.0},
        {"time_s": 14, "step": 2, "rank": 1, "loss": None},
    )
    lines = read_lines(view)
    assert [one.rank for one in lines] == [MEAN, 0, 1]
    assert lines[0].value.tolist() == [2.0, 5.0]
    assert lines[0].time.tolist() == [1.0, 3.0]
    (summary,) = summaries(lines)
    assert (summary.last, summary.least, summary.most) == (5.0, 2.0, 5.0)


def test_last_value_may_be_nan(tmp_path: Path) -> None:
    steps = [{"time_s": 1, "step": step, "rank": 0, "loss": value} for step, value in enumerate((2.0, None))]
    (summary,) = summaries(read_lines(view_with(tmp_path, *steps)))
    assert (str(summary.last), summary.least, summary.most) == ("nan", 2.0, 2.0)


def test_equal_ranks_are_one_curve(tmp_path: Path) -> None:
    view = view_with(tmp_path, *({"time_s": 1, "step": 1, "rank": rank, "loss": 2.0} for rank in range(4)))
    assert [(one.rank, one.value.tolist()) for one in read_lines(view)] == [(MEAN, [2.0])]


def test_numbers_reach_the_page_unchanged(tmp_path: Path) -> None:
    values = [0.1, 1e-30, -7.25]
    view = view_with(tmp_path, *({"time_s": at, "step": at, "rank": 0, "a": v} for at, v in enumerate(values)))
    (curve,) = page_data(read_lines(view), 1000)
    assert np.frombuffer(base64.b64decode(curve["y"]), "<f8").tolist() == values
    assert np.frombuffer(base64.b64decode(curve["step"]), "<f8").tolist() == [0, 1, 2]
    assert "epoch" not in curve  # no line has one


def test_numbers_that_no_chart_can_place_count_as_missing(tmp_path: Path) -> None:
    view = view_with(tmp_path, {"time_s": 1e300, "step": 10**17, "rank": 0, "a": 1e200})
    (one,) = read_lines(view)
    assert np.isnan([one.step[0], one.time[0], one.value[0]]).all()


def test_names_and_curves_are_bounded(tmp_path: Path) -> None:
    many: dict[str, object] = {f"metric-{at}": at for at in range(5000)}
    view = view_with(
        tmp_path, {"time_s": 1, "step": 1, "rank": 0, "x" * 10_000: 1.0}, *[{"rank": 0, "step": 2, **many}] * 2
    )
    lines = read_lines(view)
    assert len(lines) <= 200
    assert max(len(one.metric) for one in lines) <= 200
    assert len(page_data(lines, 600)) == 10  # a curve has room for 60 points at least
