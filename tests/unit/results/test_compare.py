from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import pytest

from ddptrain.errors import UsageError
from ddptrain.results.compare import compare_runs, comparison_text, find_differences
from ddptrain.results.run import Run
from ddptrain.results.run_record import AttemptRecord, BestRecord, CodeRecord, GitRecord, RankRecord, RunRecord

Rows = list[tuple[int, dict[str, float | None]]]


def put(folder: Path, run_id: str, rows: Rows, **fields: Any) -> Run:
    layout = Run(folder / run_id)
    layout.root.mkdir()
    lines = [json.dumps({"time_s": step, "step": step, "rank": 0, **values}) for step, values in rows]
    layout.metrics_jsonl.write_text("".join(f"{line}\n" for line in lines))
    last = {name: value for _, values in rows for name, value in values.items()}
    record = RunRecord(run_id=run_id, status="succeeded", started_at="2025-01-01T00:00:00Z", last_metrics=last)
    return Run(layout.root, dataclasses.replace(record, **fields))


@pytest.fixture
def views(tmp_path: Path) -> list[Run]:
    one: Rows = [(1, {"val/loss": 3.0, "val/acc": 0.2}), (2, {"val/loss": 2.0, "val/acc": 0.5}), (3, {"val/loss": 2.5})]
    two: Rows = [(1, {"val/loss": 4.0, "val/acc": 0.1, "lr": 0.1}), (2, {"val/loss": 1.0, "val/acc": 0.4, "lr": 0.2})]
    return [put(tmp_path, "a-1", one, params={"layers": 1}), put(tmp_path, "b-1", two, params={"layers": 2})]


def test_last_and_best_values_with_the_winner(views: list[Run]) -> None:
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


def test_curves_of_the_losses_or_of_chosen_metrics(views: list[Run]) -> None:
    (panel,) = compare_runs(views).plot.panels
    assert panel.quantity == "val/loss"
    assert [(curve.name, curve.main) for curve in panel.curves] == [
        ("A a-1", ([1, 2, 3], [3.0, 2.0, 2.5])),
        ("B b-1", ([1, 2], [4.0, 1.0])),
    ]
    plot = compare_runs(views, None, ["lr", "val/acc"]).plot
    assert plot.x_name == "step"
    assert [[curve.name for curve in panel.curves] for panel in plot.panels] == [["B b-1"], ["A a-1", "B b-1"]]


def test_wrong_input(views: list[Run]) -> None:
    with pytest.raises(UsageError, match=r"at least two different runs to compare, not only \w+"):
        compare_runs([views[0], views[0]])
    with pytest.raises(UsageError, match='none of the runs has logged "val/los"; did you mean val/loss'):
        compare_runs(views, None, ["val/los"])


def test_runs_without_metrics_are_compared(tmp_path: Path) -> None:
    found = compare_runs([put(tmp_path, name, [], params={"x": name}) for name in "ab"])
    assert found.differences["params"] == {"x": ["a", "b"]} and found.plot.panels == () and found.metrics == ()
    assert "params  A  B\n  x     a  b" in comparison_text(found)


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


def test_axis_is_one_that_all_runs_have(tmp_path: Path) -> None:
    def logged(run_id: str, *positions: dict[str, float]) -> Run:
        view = put(tmp_path, run_id, [])
        lines = [json.dumps({"time_s": 1, "rank": 0, "loss": 1.0, **position}) for position in positions]
        view.metrics_jsonl.write_text("".join(f"{line}\n" for line in lines))
        return view

    by_step, by_epoch = logged("s", {"step": 3}, {"step": 5}), logged("e", {"epoch": 1}, {"epoch": 2})
    both, none = logged("b", {"step": 3, "epoch": 1}), logged("n", {}, {})

    def drawn(*views: Run, axis: Literal["step", "epoch"] | None = None) -> tuple[str, list[list[float]]]:
        plot = compare_runs(views, axis).plot
        return plot.x_name, [curve.main[0] for curve in plot.panels[0].curves]

    assert drawn(by_step, both) == ("step", [[3, 5], [3]])
    assert drawn(by_epoch, both) == ("epoch", [[1, 2], [1]])
    assert drawn(by_epoch, by_step) == ("step", [[0, 1], [3, 5]])  # the number of the call
    assert drawn(none, by_step) == ("step", [[0, 1], [3, 5]])
    with pytest.raises(UsageError, match="run n has logged loss without epoch"):
        drawn(both, none, axis="epoch")


def put_inputs(folder: Path, run_id: str, config: str = "", manifest: str = "", **fields: Any) -> Run:
    layout = Run(folder / run_id)
    layout.inputs_dir.mkdir(parents=True)
    layout.config_yaml.write_text(config)
    if manifest:
        (layout.inputs_dir / "manifest.json").write_text(manifest)
    return Run(layout.root, dataclasses.replace(RunRecord(run_id=run_id, status="succeeded"), **fields))


def test_only_what_differs_is_found(tmp_path: Path) -> None:
    ranks = (RankRecord(0, host="h1", gpu="0"), RankRecord(1, host="h2"))
    one = put_inputs(
        tmp_path,
        "a",
        "name: n\nparams: {layers: 9}\ndist: {backend: gloo, timeout_s: 1}",
        "[1]",
        params={"layers": 1, "opt": {"lr": 0.1, "wd": 0}},
        git=GitRecord("a" * 40, dirty=False),
        versions={"torch": "2.6", "python": "3.11"},
    )
    other = put_inputs(
        tmp_path,
        "b",
        "name: n\nparams: {layers: 9}\ndist: {backend: nccl, timeout_s: 1}",
        "[2]",
        params={"layers": 1, "opt": {"lr": 0.2, "wd": 0}, "new": None},
        git=GitRecord("b" * 40, dirty=True),
        code=CodeRecord("c" * 64, files=3),
        versions={"torch": "2.7", "python": "3.11"},
        attempts=(AttemptRecord(ranks=ranks),),
        world_size=2,
    )
    assert find_differences([one, other]) == {
        "params": {"opt.lr": [0.1, 0.2]},
        "config": {"dist.backend": ["gloo", "nccl"]},
        "code": {
            "git commit": ["a" * 12, "b" * 12],
            "uncommitted changes": [False, True],
            "uploaded code": [None, "c" * 12],
            "uploaded files": [None, 3],
        },
        "data": {"manifest.json": ["sha256 080a9ed42855", "sha256 038966de9f6b"]},
        "versions": {"torch": ["2.6", "2.7"]},
        "environment": {"ranks": [0, 2], "hosts": [[], ["h1", "h2"]], "GPUs": [0, 1]},
    }
