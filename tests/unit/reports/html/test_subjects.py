"""Which runs and sweep the names on the command line stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddptrain.errors import RunNotFound, UsageError
from ddptrain.reports.html.page_content import SweepTable, find_subjects
from ddptrain.results.run_record import RunRecord
from ddptrain.results.sweep_record import read_sweep
from tests.unit.results.stores import serve_folder


def add_run(runs: Path, name: str, status: str = "succeeded") -> None:
    (runs / name).mkdir(parents=True)
    (runs / name / "run.json").write_text(RunRecord(run_id=name, status=status).to_json())


def trial(number: int, value: Any, state: str = "complete", **given: Any) -> dict[str, Any]:
    return {"number": number, "params": {"params.lr": 0.1, "params.kind": "a"}, "state": state, "value": value,
            "run_ids": [f"sweep-{number:04d}"], **given}  # fmt: skip


def write_sweep(runs: Path, trials: list[Any], **given: Any) -> Path:
    folder = runs / "sweep"
    folder.mkdir(parents=True)
    space = {
        "params.lr": {"kind": "log", "low": 1e-4, "high": 0.1},
        "params.kind": {"kind": "choice", "values": ["a", 2]},
    }
    content = {
        "format": 1,
        "sweep_id": "sweep",
        "name": "s",
        "source": "",
        "started_at": "",
        "status": "succeeded",
        "metric": "loss",
        "mode": "min",
        "space": space,
        "best": 1,
    }
    (folder / "run.json").write_text('{"run_id": "sweep", "kind": "sweep", "status": "succeeded"}')
    (folder / "sweep.json").write_text(json.dumps({**content, "trials": trials, **given}))
    return folder


def find(names: list[str], folder: Path) -> list[str]:
    return [view.run_id for view in find_subjects(names, str(folder)).views]


def test_runs_are_found_once(tmp_path: Path) -> None:
    for name in ("a-1", "b-2"):
        add_run(tmp_path, name)
    assert find(["a", "b-2", "a-1", str(tmp_path / "b-2")], tmp_path) == ["a-1", "b-2"]
    with pytest.raises(RunNotFound, match='no run "c"'):
        find(["c"], tmp_path)


def test_runs_of_a_sweep_are_the_best_ones_first(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, [trial(0, 3.0), trial(1, 1.0), trial(2, 0.5, "pruned"), trial(3, None, "failed")])
    for number in range(4):
        add_run(folder, f"sweep-{number:04d}")
    assert find(["sweep"], tmp_path) == ["sweep-0001", "sweep-0000", "sweep-0002", "sweep-0003"]


@pytest.mark.parametrize("is_named_by_url", [True, False])
def test_sweep_in_a_store_is_found_with_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_named_by_url: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = tmp_path / "store"
    folder = write_sweep(store / "runs", [trial(0, 3.0), trial(1, 1.0), trial(2, 0.5)])
    for number in range(2):  # the third trial has no run yet
        add_run(folder, f"sweep-{number:04d}")
    (folder / "sweep-0001" / "metrics.jsonl").write_text("{}\n")
    url = serve_folder(store, monkeypatch) + "/runs"
    name, runs_dir = (f"{url}/{folder.name}/", "runs") if is_named_by_url else ("sweep", url)
    found = find_subjects([name], runs_dir)
    assert found.sweep is not None and found.sweep.record.sweep_id == "sweep"
    assert [view.run_id for view in found.views] == ["sweep-0001", "sweep-0000"]
    assert found.views[0].layout.metrics_jsonl.read_text() == "{}\n"


def test_run_in_a_store_is_no_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    add_run(tmp_path / "store", "a-1")
    found = find_subjects([f"{serve_folder(tmp_path, monkeypatch)}/store/a-1"], "runs")
    assert (found.sweep, [view.run_id for view in found.views]) == (None, ["a-1"])


def test_larger_is_better_with_mode_max(tmp_path: Path) -> None:
    sweep = SweepTable.of(read_sweep(write_sweep(tmp_path, [trial(0, 3.0), trial(1, 1.0)], mode="max")))
    assert [one.number for one in sweep.ranked()] == [0, 1]


def test_run_ids_that_are_paths_are_left_out(tmp_path: Path) -> None:
    add_run(tmp_path, "outside")
    write_sweep(tmp_path / "runs", [trial(0, 1.0, run_ids=["../../outside", "nope"])])
    assert find(["sweep"], tmp_path / "runs") == []


def test_sweep_whose_driver_was_killed_is_not_running(tmp_path: Path) -> None:
    write_sweep(tmp_path, [trial(0, 1.0, "running")], status="running")
    found = find_subjects(["sweep"], str(tmp_path)).sweep
    assert found is not None
    assert (found.record.status, found.trials[0].state) == ("interrupted", "interrupted")


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000])
def test_sweep_that_is_not_json_is_one_clear_line(tmp_path: Path, content: str) -> None:
    (write_sweep(tmp_path, []) / "sweep.json").write_text(content)
    with pytest.raises(UsageError, match=r"cannot read .*sweep\.json: it is not"):
        find(["sweep"], tmp_path)


def test_two_sweeps_and_too_many_runs_are_refused(tmp_path: Path) -> None:
    write_sweep(tmp_path / "a", [])
    write_sweep(tmp_path / "b", [])
    with pytest.raises(UsageError, match="at most one sweep, got 2"):
        find([str(tmp_path / "a/sweep"), str(tmp_path / "b/sweep")], tmp_path)
    for number in range(101):
        add_run(tmp_path, f"r-{number}")
    with pytest.raises(UsageError, match="at most 100 runs, got 101"):
        find([f"r-{number}" for number in range(101)], tmp_path)
