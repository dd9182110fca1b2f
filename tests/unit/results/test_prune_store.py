"""Runs in an object store are deleted: readers find a complete run or none, at whatever write the process dies."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import PermissionDeniedError

from ddptrain.errors import RunLocked
from ddptrain.results.prune import MARK, PrunePolicy, StoredRemoval, prune
from ddptrain.results.remote.lease import LOCK, Claim
from ddptrain.results.remote.runs import StoreRuns
from ddptrain.results.run_record import DriverRecord, RunRecord
from tests.unit.results.stores import WatchedStore, watched_store

ALL = PrunePolicy(keep=0, failed_keep=0)
FILES = ("checkpoints/step-1/model.safetensors", "checkpoints/step-1/checkpoint.json", "logs/rank-0.log")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoreRuns:
    """An empty store, seen from a machine whose folders are below tmp_path."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store, _ = watched_store()
    return StoreRuns(store)


def put(runs: StoreRuns, run_id: str, status: str = "succeeded", day: int = 1, **fields: object) -> int:
    """Write a run; return its size in bytes."""
    record = RunRecord(run_id=run_id, name="pets", status=status, started_at=f"2025-01-{day:02}T00:00:00.000Z")
    files = dict.fromkeys(FILES, b"x" * 100)
    files["run.json"] = dataclasses.replace(record, **fields).to_json().encode()  # type: ignore[arg-type]
    for name, data in files.items():
        runs.store.write(f"{run_id}/{name}", data)
    return sum(map(len, files.values()))


def claim(runs: StoreRuns, run_id: str, **fields: object) -> None:
    """Write the lease of a driver of another machine."""
    mine = dataclasses.replace(Claim.of_this_process(), host="elsewhere", machine="elsewhere")
    changed = dataclasses.replace(mine, **fields)  # type: ignore[arg-type]
    runs.store.write(f"{run_id}/{LOCK}", json.dumps(dataclasses.asdict(changed)).encode())


def fs_of(runs: StoreRuns) -> WatchedStore:
    watched: Any = runs.store.store
    return watched._store  # type: ignore[no-any-return]


def test_old_runs_are_deleted_with_all_their_files_and_the_lock(runs: StoreRuns) -> None:
    size = put(runs, "old", day=1)
    put(runs, "new", day=2)
    (runs.work / "old").mkdir(parents=True)
    report = prune(runs, PrunePolicy(keep=1))
    assert [(each.run.folder, each.run.size_bytes) for each in report.removed] == [("old", size)]
    assert {path.partition("/")[0] for path in runs.store.files()} == {"new"}
    assert not (runs.work / "old").exists() and [view.run_id for view in runs.list()] == ["new"]


def test_death_at_each_write_leaves_the_complete_run_or_none(runs: StoreRuns) -> None:
    fs, seen = fs_of(runs), []
    for step in range(1, 100):
        put(runs, "old")
        count = itertools.count(1)

        def fail(path: str, count: Iterator[int] = count, step: int = step) -> Exception | None:
            return PermissionDeniedError("dead") if next(count) >= step else None

        fs.fails = fail  # from this write on nothing arrives any more
        prune(runs, ALL)
        fs.fails = lambda path: None
        listed = [view.run_id for view in runs.list()]
        left = {path.partition("/")[2] for path in runs.store.files()} - {LOCK}
        assert left >= {*FILES, "run.json"} if listed else "run.json" not in left
        seen.append((bool(listed), bool(left)))
        if runs.store.read(f"old/{LOCK}") is not None:
            claim(runs, "old", released=True)  # as if the lease of the dead process had expired
        report = prune(runs, ALL)
        assert not report.problems
        assert set(runs.store.files()) <= {f"old/{LOCK}"}  # the lock alone is left if nothing else was
        if next(count) <= step:  # no write has failed
            break
    assert seen[0] == (True, True) and seen[-1] == (False, False) and (False, True) in seen


def test_run_with_a_living_driver_stays(runs: StoreRuns) -> None:
    put(runs, "live", "running")
    claim(runs, "live")
    assert [(each.reason) for each in prune(runs, ALL).kept] == ["running"]
    put(runs, "resumed", "failed", day=1)
    put(runs, "newer", "failed", day=2)
    claim(runs, "resumed")  # resumed, and run.json is not written yet
    report = prune(runs, ALL)
    assert {each.run.folder: each.reason for each in report.kept}["resumed"] == "in use"
    assert runs.store.read("resumed/run.json") is not None and not report.problems


def test_run_that_was_resumed_meanwhile_stays(runs: StoreRuns) -> None:
    put(runs, "night", "failed")
    [seen] = runs.list()
    put(runs, "night", "failed", driver=DriverRecord(7, "elsewhere", "boot"))
    removal = StoredRemoval(runs)
    with pytest.raises(RunLocked, match="has changed since it was chosen"):
        removal.remove(seen)
    assert runs.store.read("night/checkpoints/step-1/checkpoint.json") is not None


def test_leftover_is_no_run_and_is_finished_unless_its_prune_is_alive(runs: StoreRuns) -> None:
    put(runs, "night")
    runs.store.remove("night/run.json")
    assert not prune(runs, ALL).finished_bytes  # no mark: perhaps a run that has just begun
    runs.store.write(f"night/{MARK}", b"{}")
    claim(runs, "night")
    assert prune(runs, ALL).finished_bytes == {} and len(runs.store.files()) == 5
    claim(runs, "night", released=True)
    assert prune(runs, ALL, dry_run=True).finished_bytes.keys() == {"night"} and len(runs.store.files()) == 5
    assert prune(runs, ALL).freed_bytes > 300
    assert runs.store.files() == {}


def test_resumable_run_stays(runs: StoreRuns) -> None:
    put(runs, "night", "failed")
    assert [each.reason for each in prune(runs, ALL).kept] == ["can be resumed"]


def test_store_that_stops_answering_ends_the_prune_with_one_problem(runs: StoreRuns) -> None:
    for day in range(1, 5):
        put(runs, f"run-{day}", day=day)
    fs_of(runs).fails = lambda path: OSError("kind: Timeout") if "run-3/" in path else None
    report = prune(runs, ALL)
    assert [each.run.folder for each in report.removed] == ["run-4"] and len(report.problems) == 1
    assert {each.run.folder: each.reason for each in report.kept} == {
        "run-3": "cannot be deleted",
        "run-2": "the store does not answer",
        "run-1": "the store does not answer",
    }
