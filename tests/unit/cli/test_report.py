"""`ddptrain results report`: what it writes, and about what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddptrain.cli.main import app
from ddptrain.errors import RunNotFound, UsageError
from ddptrain.results.run_record import RunRecord
from ddptrain.results.sweep_record import SweepRecord, TrialRecord, TrialState


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "runs", "a-1", "succeeded", "2026-01-01T00:00:00Z")
    return tmp_path / "runs"


def put(runs: Path, name: str, status: str, started: str) -> None:
    (runs / name).mkdir(parents=True, exist_ok=True)
    (runs / name / "run.json").write_text(RunRecord(run_id=name, status=status, started_at=started).to_json())


def put_sweep(runs: Path, name: str, started: str) -> None:
    put(runs / name, f"{name}-0000", "succeeded", started)
    trial = TrialRecord(0, {}, TrialState.COMPLETE, 1.0, [1.0], run_ids=[f"{name}-0000"])
    SweepRecord(name, "s", "s.yaml", started, trials=[trial]).save(runs / name)


def report(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["results", "report", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_latest_run_and_its_page(runs: Path) -> None:
    data = json.loads(report("--json"))
    page = Path("a-1.html").read_bytes()
    assert data == {
        "file": str(runs.parent / "a-1.html"),
        "size_bytes": len(page),
        "runs": ["a-1"],
        "sweep": None,
    }
    assert page.startswith(b"<!DOCTYPE html>") and b"<title>Run a-1</title>" in page


@pytest.mark.parametrize(("started", "is_newest"), [("2026-01-02T00:00:00Z", True), ("2025-12-31T00:00:00Z", False)])
def test_latest_is_a_sweep_if_that_is_newer(runs: Path, started: str, is_newest: bool) -> None:
    put_sweep(runs, "s-1", started)
    data = json.loads(report("--json"))
    assert (data["sweep"], data["runs"]) == (("s-1", ["s-1-0000"]) if is_newest else (None, ["a-1"]))


def test_latest_is_the_sweep_where_there_is_no_other_run(runs: Path) -> None:
    (runs / "a-1" / "run.json").unlink()
    put_sweep(runs, "s-1", "2025-12-31T00:00:00Z")
    assert json.loads(report("latest", "--json"))["sweep"] == "s-1"


def test_wrong_names_and_files_write_nothing(runs: Path) -> None:
    for arguments, error in ((["nope"], RunNotFound), (["-o", "-"], UsageError), (["-o", "runs"], UsageError)):
        with pytest.raises(error):
            report(*arguments)
    assert list(runs.parent.glob("*.html")) == []
