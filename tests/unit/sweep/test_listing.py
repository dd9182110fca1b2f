"""The list of sweeps: a line and a JSON object for each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddptrain.results import ownership
from ddptrain.sweep.folder import LOCK
from ddptrain.sweep.listing import find_listed, list_sweeps, sweep_table
from ddptrain.sweep.output import summary_lines
from ddptrain.sweep.records import SweepRecord, TrialRecord, TrialState
from tests.unit.results.stores import serve_folder

TRIALS = [
    TrialRecord(0, {"params.lr": 1}, TrialState.COMPLETE, 2.5),
    TrialRecord(1, {"params.lr": 2}, TrialState.PRUNED, 9.0),
    TrialRecord(2, {"params.lr": 3}, TrialState.RUNNING, 1.0),
]


def save(runs: Path, name: str, started_at: str, **fields: object) -> Path:
    folder = runs / name
    folder.mkdir(parents=True)
    SweepRecord(name, "pets", "pets.yaml", started_at, **fields).save(folder)  # type: ignore[arg-type]
    return folder


def test_each_sweep_is_a_line_the_newest_first(tmp_path: Path) -> None:
    save(tmp_path, "older", "2026-03-01T10:00:00Z", status="succeeded", duration_s=61.0, planned=3, trials=TRIALS)
    save(tmp_path, "newer", "2026-03-02T10:00:00Z", status="failed")
    (tmp_path / "run").mkdir()
    assert sweep_table(list_sweeps(str(tmp_path)))[1:] == [
        ("newer", "failed", "2026-03-02 10:00:00", "-", "0", "-"),
        ("older", "succeeded", "2026-03-01 10:00:00", "1m 01s", "2 of 3", "trial 0, val/loss 2.5"),
    ]


def test_a_sweep_runs_as_long_as_its_lock_is_held(tmp_path: Path) -> None:
    folder = save(tmp_path, "mine", "2026-03-01T10:00:00Z", trials=TRIALS)
    held = ownership.take(folder / LOCK)
    assert [each.record.status for each in list_sweeps(str(tmp_path))] == ["running"]
    os.close(held)
    assert [each.record.status for each in list_sweeps(str(tmp_path))] == ["interrupted"]


def test_trials_of_a_killed_driver_are_interrupted(tmp_path: Path) -> None:
    folder = save(tmp_path, "mine", "2026-03-01T10:00:00Z", trials=TRIALS)
    held = ownership.take(folder / LOCK)
    running = find_listed(str(tmp_path), "mine")
    assert running is not None and running.record.trials[2].state is TrialState.RUNNING
    assert "  2      running   1         -          -" in summary_lines(running.record, "there")
    os.close(held)
    killed = find_listed(str(tmp_path), "mine")
    assert killed is not None and killed.record.trials[2].state is TrialState.INTERRUPTED


def test_json_has_the_best_trial_and_counts(tmp_path: Path) -> None:
    save(tmp_path, "mine", "2026-03-01T10:00:00Z", status="succeeded", exit_code=0, planned=3, trials=TRIALS)
    (found,) = (each.as_dict() for each in list_sweeps(str(tmp_path)))
    assert (found["sweep_id"], found["status"], found["ended"], found["planned"]) == ("mine", "succeeded", 2, 3)
    assert (found["best"]["number"], found["sweep_dir"]) == (0, f"{tmp_path}/mine")


def test_sweeps_of_a_store_are_listed_without_reading_known_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save(tmp_path / "store", "mine", "2026-03-01T10:00:00Z", status="succeeded")
    save(tmp_path / "store", "run", "2026-03-02T10:00:00Z", status="succeeded")
    url = serve_folder(tmp_path, monkeypatch) + "/store"
    found = list_sweeps(url, {"run"})
    assert [(each.record.sweep_id, each.where) for each in found] == [("mine", f"{url}/mine")]
