from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ddptrain.errors import RunNotFound, UsageError
from ddptrain.protocol.events import CheckpointSaved
from ddptrain.results.checkpoints.run_checkpoints import CheckpointPolicy
from ddptrain.results.run import DRIVER_GONE, Run, newest_trained
from ddptrain.results.run_record import RunRecord
from ddptrain.results.run_writer import RunWriter
from ddptrain.results.runs import LocalRuns

Driver = Callable[[str], subprocess.Popen[str]]


def put(runs_dir: Path, run_id: str, started_at: str = "2025-01-01T00:00:00.000Z", **fields: object) -> Path:
    """A run's directory with a run.json, and nothing else."""
    layout = Run(runs_dir / run_id)
    layout.root.mkdir(parents=True)
    record = RunRecord(run_id=run_id, status="succeeded", exit_code=0, started_at=started_at)
    layout.run_json.write_text(dataclasses.replace(record, **fields).to_json())  # type: ignore[arg-type]
    return layout.root


def test_a_run_is_found_by_id_prefix_latest_and_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    old, new = put(runs, "pets-1"), put(runs, "dogs-1", "2025-02-01T00:00:00.000Z")
    put(runs, "pets-11", "2024-01-01T00:00:00.000Z")
    assert LocalRuns(runs).find("pets-1").root == old
    assert LocalRuns(runs).find("dog").root == new
    assert LocalRuns(runs).find("latest").root == new
    assert LocalRuns(tmp_path).find(str(old)).root == old
    monkeypatch.chdir(old)
    assert LocalRuns(tmp_path).find(".").root == old
    assert LocalRuns(tmp_path).find("../dogs-1/").root == new


def test_an_ambiguous_prefix_names_the_candidates(tmp_path: Path) -> None:
    put(tmp_path, "pets-1")
    put(tmp_path, "pets-2")
    with pytest.raises(RunNotFound, match='"pets" matches 2 runs: pets-1, pets-2; give more'):
        LocalRuns(tmp_path).find("pets")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pets", '"pets" is a sweep; its trials are runs: pets-0000, pets-0001'),
        ("pets/7", 'sweep "pets" has no trial 7; its trials are runs: pets-0000, pets-0001'),
        ("begun", '"begun" is a sweep, and no trial has begun'),
        ("begun/0", 'sweep "begun" has no trial 0, and no trial has begun'),
    ],
)
def test_the_name_of_a_sweep_in_place_of_a_run_is_met_with_its_trials(tmp_path: Path, name: str, message: str) -> None:
    for sweep in ("pets", "begun"):
        put(tmp_path, sweep)
        (tmp_path / sweep / "sweep.json").write_text("{}")
    put(tmp_path / "pets", "pets-0000")
    put(tmp_path / "pets", "pets-0001")
    put(tmp_path, "other")
    with pytest.raises(RunNotFound) as caught:
        LocalRuns(tmp_path).find(name)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("run", ["latest", "x", "", "..", "/nowhere", "a/b", "a\0b", "x" * 5000])
def test_with_no_runs_nothing_is_found(tmp_path: Path, run: str) -> None:
    with pytest.raises(RunNotFound) as missed:
        LocalRuns(tmp_path / "runs").find(run)
    assert missed.value.exit_code == 2


def test_runs_are_listed_newest_first_and_other_folders_are_not(tmp_path: Path) -> None:
    put(tmp_path, "a", "2025-01-01T00:00:00.000Z")
    put(tmp_path, "b", "2025-01-03T00:00:00.000Z")
    put(tmp_path, "c", "2025-01-02T00:00:00+00:00")
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").touch()
    assert [view.run_id for view in LocalRuns(tmp_path).list()] == ["b", "c", "a"]
    assert LocalRuns(tmp_path / "missing").list() == []
    with pytest.raises(UsageError, match="cannot list"):
        LocalRuns(tmp_path / "file").list()


def test_record_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    with (tmp_path / "big" / "run.json").open("wb") as file:
        file.truncate(1 << 40)  # without taking room on the disk
    view = Run(tmp_path / "big")
    assert view.status == "unreadable"
    assert "File too large" in view.problem


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"run_id": 3}', "\0" * 100])
def test_a_damaged_run_is_listed_as_unreadable(tmp_path: Path, text: str) -> None:
    put(tmp_path, "good")
    damaged = put(tmp_path, "bad-20250601-120000-00ff")
    Run(damaged).run_json.write_text(text)
    bad, good = LocalRuns(tmp_path).list()
    assert (bad.run_id, bad.status, good.status) == ("bad-20250601-120000-00ff", "unreadable", "succeeded")
    assert "run.json" in bad.problem
    assert bad.record.started_at.startswith("2025-06-01T12:00:00")


@pytest.mark.parametrize("run_id", ["/home/other/x", "../x", "a/b", "-x", "a\nb", "x" * 200])
def test_name_in_the_record_that_leads_elsewhere_makes_the_run_unreadable(tmp_path: Path, run_id: str) -> None:
    folder = put(tmp_path, "bad-1")
    Run(folder).run_json.write_text(RunRecord(run_id=run_id, status="succeeded").to_json())
    view = Run(folder)
    assert (view.run_id, view.status) == ("bad-1", "unreadable") and "cannot be the name of a run" in view.problem


def test_a_run_whose_driver_was_killed_has_failed(tmp_path: Path, driver: Driver) -> None:
    process = driver("a-run")
    process.kill()
    process.wait()
    root = tmp_path / "runs" / "a-run"
    before = Run(root).run_json.read_bytes()
    view = Run(root)
    assert (view.status, view.record.exit_code) == ("failed", None)
    assert view.record.failure is not None and view.record.failure.message == DRIVER_GONE
    assert view.record.ended_at is not None and view.record.ended_at >= view.record.started_at[:19]
    assert view.duration_s is not None
    assert Run(root).run_json.read_bytes() == before


def test_a_checkpoint_is_found_by_pointer_and_by_name(
    writer: RunWriter, stage: Callable[..., tuple[CheckpointSaved, Path]]
) -> None:
    for step, loss in ((9, 1.0), (10, 2.0)):
        writer.adopt_checkpoint(0, *stage(step, {"val/loss": loss}), CheckpointPolicy())
    assert Run(writer.layout.root).checkpoint().name == "step-10"
    assert Run(writer.layout.root).checkpoint("best").name == "step-9"
    assert Run(writer.layout.root).checkpoint("step-9").name == "step-9"
    with pytest.raises(RunNotFound, match="has no checkpoint step-7; it has step-9, step-10"):
        Run(writer.layout.root).checkpoint("step-7")
    (writer.layout.checkpoints_dir / "latest").write_text("../../etc\n")
    assert Run(writer.layout.root).checkpoint().name == "step-10"


@pytest.mark.parametrize(
    ("fields", "duration_s"),
    [
        ({"duration_s": 5.0, "earlier_s": 3.0}, 5.0),
        ({"ended_at": "2025-01-01T00:00:07Z"}, 7.0),
        ({"ended_at": "2025-01-01T00:00:07Z", "resumed_at": "2025-01-01T00:00:04Z", "earlier_s": 10.0}, 13.0),
        ({"ended_at": "2025-01-01T00:00:07Z", "earlier_s": -1.0}, 7.0),
        ({"ended_at": "2024-12-31T00:00:07Z", "earlier_s": 2.0}, 2.0),
        ({"ended_at": "2025-01-01T00:00:07Z", "started_at": "?"}, None),
        ({}, None),
    ],
)
def test_duration_is_that_of_all_parts(tmp_path: Path, fields: dict[str, object], duration_s: float | None) -> None:
    view = Run(put(tmp_path, "r", **fields))  # type: ignore[arg-type]
    assert view.duration_s == duration_s
    assert view.as_dict()["duration_s"] == duration_s


def test_trial_is_found_by_its_number_in_the_sweep(tmp_path: Path) -> None:
    trial = put(tmp_path / "sweep", "sweep-0007")
    more = put(tmp_path / "sweep", "sweep-0007-s3")
    for name in ("sweep/7", "sweep/0007", "sweep-0007"):
        assert LocalRuns(tmp_path).find(name).root == trial
    assert LocalRuns(tmp_path).find("sweep-0007-s3").root == more
    for name in ("sweep/8", "sweep/7x", "sweep/1000000007", "sweep-007"):
        with pytest.raises(RunNotFound):
            LocalRuns(tmp_path).find(name)


def test_pointer_without_its_checkpoint_gives_the_newest(tmp_path: Path) -> None:
    layout = Run(tmp_path / "r")
    for step in (9, 10, 11):
        (layout.checkpoints_dir / f"step-{step}").mkdir(parents=True)
    for step in (9, 10):
        (layout.checkpoints_dir / f"step-{step}/checkpoint.json").touch()
    assert Run(layout.root).checkpoint().name == "step-10"
    for text, name in (("step-9\n", "step-9"), ("step-11\n", "step-10"), ("nonsense", "step-10")):
        (layout.checkpoints_dir / "best").write_text(text)
        assert Run(layout.root).checkpoint("best").name == name
    with pytest.raises(RunNotFound, match=r"^run r has no checkpoint step-11; it has step-9, step-10$"):
        Run(layout.root).checkpoint("step-11")


def view(run_id: str, workload: str, *checkpoints: str) -> Run:
    return Run(Path("runs") / run_id, RunRecord(run_id=run_id, workload=workload, checkpoints=checkpoints))


VIEWS = (
    view("d", "petnames"),
    view("c", "images", "step-1"),
    view("b", "petnames", "step-2"),
    view("a", "petnames", "x"),
)


def test_runs_of_others_and_without_a_checkpoint_are_skipped() -> None:
    assert newest_trained(VIEWS, "petnames").run_id == "b"
    assert newest_trained(VIEWS, "images").run_id == "c"
