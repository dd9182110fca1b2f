"""Runs in a folder are deleted: completely or not at all, and only those that nobody uses."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddptrain.errors import RunLocked
from ddptrain.results.layout import PRUNED, RunLayout
from ddptrain.results.lookup import list_runs
from ddptrain.results.prune import Decision, FolderRemoval, PrunePolicy, PruneReport, RunFacts, prune
from ddptrain.results.run_record import RunRecord, RunStatus
from ddptrain.results.run_store import LocalRuns
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.show.render import size

Driver = Callable[[str], subprocess.Popen[str]]
ALL = PrunePolicy(keep=0, failed_keep=0)


def put(runs: Path, run_id: str, status: str = "succeeded", day: int = 1, **fields: object) -> Path:
    """A run directory of 1,000 bytes and a run.json."""
    layout = RunLayout(runs / run_id)
    folder = layout.checkpoints_dir / "step-1"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"w" * 600)
    (folder / "checkpoint.json").write_bytes(b" " * 100)
    layout.logs_dir.mkdir()
    layout.log(0).write_bytes(b"l" * 300)
    record = RunRecord(run_id=run_id, name="pets", status=status, started_at=f"2025-01-{day:02}T00:00:00.000Z")
    layout.run_json.write_text(dataclasses.replace(record, **fields).to_json())  # type: ignore[arg-type]
    return layout.root


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_old_runs_are_deleted_and_counted(runs: Path) -> None:
    old, new = put(runs, "old", day=1), put(runs, "new", day=2)
    size = 1000 + (old / "run.json").stat().st_size
    report = prune(LocalRuns(runs), PrunePolicy(keep=1))
    assert [(each.run.folder, each.run.size_bytes, each.reason) for each in report.removed] == [
        ("old", size, "1 newer successful run")
    ]
    assert report.freed_bytes == size and report.kept_bytes == 1000 + (new / "run.json").stat().st_size
    assert os.listdir(runs) == ["new"] and not report.problems


def test_dry_run_changes_nothing(runs: Path) -> None:
    put(runs, "old")
    before = sorted(runs.rglob("*"))
    report = prune(LocalRuns(runs), ALL, dry_run=True)
    assert [each.run.folder for each in report.removed] == ["old"]
    assert sorted(runs.rglob("*")) == before
    assert report.summary == f"1 run would be deleted, {size(report.freed_bytes)} would be freed"


def test_kill_at_each_step_leaves_the_complete_run_or_none(tmp_path: Path) -> None:
    original = put(tmp_path, "pets-1")
    script = Path(__file__).with_name("kill_at_each_step.py")
    done = subprocess.run([sys.executable, script, original], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["exit"] == 0
    states = [(state["complete"], state["leftover"]) for state in told["seen"]]
    assert states[0] == ([True], 0) and states[-1] == ([], 0)
    assert {tuple(complete) for complete, _ in states} == {(True,), ()}  # never a partial run
    assert sum(leftover for _, leftover in states) >= 5  # each was finished by the next prune:
    assert all(state["after"] == [] for state in told["seen"])


def test_running_run_stays(runs: Path, driver: Driver) -> None:
    process = driver("a-run")
    assert not prune(LocalRuns(runs), ALL).removed
    process.kill()
    process.wait()
    report = prune(LocalRuns(runs), ALL)
    assert [(each.run.folder, each.run.status) for each in report.removed] == [("a-run", "failed")]
    assert os.listdir(runs) == []


def test_run_that_is_resumed_after_the_decision_stays(runs: Path) -> None:
    folder = put(runs, "night", "failed", day=1)
    put(runs, "newer", day=2)
    [seen] = [view for view in list_runs(runs) if view.run_id == "night"]
    with RunWriter.reopen(folder, "", seen.record.driver) as writer:
        with pytest.raises(RunLocked, match="held by process"):
            FolderRemoval(LocalRuns(runs)).remove(seen)
        report = prune(LocalRuns(runs), ALL)
        assert [(each.run.folder, each.reason) for each in report.kept] == [("night", "running")]
        writer.finish(RunStatus.FAILED, 1)
    resumed = dataclasses.replace(writer.record, driver=dataclasses.replace(writer.record.driver, pid=1))
    RunLayout(folder).run_json.write_text(resumed.to_json())
    with pytest.raises(RunLocked, match="has changed since it was chosen"):
        FolderRemoval(LocalRuns(runs)).remove(seen)
    assert (folder / "checkpoints/step-1/model.safetensors").is_file()


def test_two_prunes_at_once_delete_everything_without_a_problem(runs: Path) -> None:
    for day in range(1, 21):
        put(runs, f"run-{day}", day=day)
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda _: prune(LocalRuns(runs), PrunePolicy(keep=2)), range(4)))
    assert sorted(os.listdir(runs)) == ["run-19", "run-20"]
    assert [report.problems for report in reports] == [()] * 4


def test_leftover_of_a_killed_prune_is_no_run_and_is_finished(runs: Path) -> None:
    folder = put(runs, "night")
    aside = folder.rename(runs / f"{PRUNED}night-00112233")
    assert LocalRuns(runs).list() == []
    told = prune(LocalRuns(runs), PrunePolicy(), dry_run=True)
    assert told.finished_bytes.keys() == {aside.name} and aside.exists()
    report = prune(LocalRuns(runs), PrunePolicy(name="other"))
    assert report.freed_bytes == told.freed_bytes > 1000
    assert os.listdir(runs) == []


def test_symbolic_links_are_neither_deleted_nor_followed(runs: Path, tmp_path: Path) -> None:
    elsewhere = put(tmp_path / "elsewhere", "linked")
    inside = put(runs, "pets-1")
    (runs / "linked").symlink_to(elsewhere)
    (inside / "artifacts").symlink_to(elsewhere)
    report = prune(LocalRuns(runs), ALL)
    assert [(each.run.folder, each.reason) for each in report.kept] == [("linked", "a symbolic link")]
    assert os.listdir(runs) == ["linked"] and (elsewhere / "checkpoints/step-1/model.safetensors").is_file()


def test_run_of_another_user_stays(runs: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder of another user")
    os.chown(put(runs, "theirs"), 12345, -1)
    report = prune(LocalRuns(runs), PrunePolicy(keep=0, max_size_bytes=0))
    assert [(each.run.folder, each.reason) for each in report.kept] == [("theirs", "of another user")]


def test_report_as_data_and_in_words() -> None:
    gone, stays = (
        Decision(RunFacts(name, f"{name}-id", "n", "failed", 1.5, 1024), name == "a", "why") for name in "ab"
    )
    report = PruneReport((gone, stays), {"c": 2048}, ("cannot", "either"), dry_run=False)
    facts = {"name": "n", "status": "failed", "age_s": 1.5, "size_bytes": 1024, "has_checkpoint": False}
    end = {**facts, "foreign": "", "problem": "", "reason": "why"}
    assert report.as_dict() == {
        "dry_run": False,
        "freed_bytes": 3072,
        "kept_bytes": 1024,
        "removed": [{"folder": "a", "run_id": "a-id", **end}],
        "kept": [{"folder": "b", "run_id": "b-id", **end}],
        "finished": [{"folder": "c", "size_bytes": 2048}],
        "problems": ["cannot", "either"],
    }
    assert report.summary == "1 run deleted, 3.0 KiB freed; 2 problems"
