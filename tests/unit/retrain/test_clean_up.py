"""The clean-up deletes old versions and runs, and leaves what any model uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddptrain.model_registry.records import VersionRecord
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.results.layout import RunLayout
from ddptrain.results.run_record import RunRecord
from ddptrain.retrain.clean_up import clean_up


def put(run_id: str, day: int, status: str = "succeeded", name: str = "pets") -> None:
    layout = RunLayout(Path("runs") / run_id)
    layout.root.mkdir(parents=True)
    record = RunRecord(run_id=run_id, name=name, status=status, started_at=f"2025-01-{day:02}T00:00:00.000Z")
    layout.run_json.write_text(record.to_json())


def test_versions_and_runs_beyond_keep_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    registry = ModelRegistry.open("models")
    for day in range(1, 9):
        put(f"run-{day}", day)
        put(f"bad-{day}", day, "failed")
        record = VersionRecord("", 0, "", f"run-{day}", "petnames", 1, {}, ())
        registry.promote("names", registry.add_version("names", {"w": b"w" * 100}, record).version)
    put("other", 1, name="dogs")
    other = registry.add_version("others", {"w": b"w"}, VersionRecord("", 0, "", "run-1", "petnames", 1, {}, ()))
    registry.pin("others", other.version, pinned=True)

    report = clean_up(registry, "names", 3, "runs", "pets")
    assert report.versions.removed == (1, 2, 3, 4, 5) and report.versions.kept.keys() == {6, 7, 8}
    assert sorted(path.name for path in Path("runs").iterdir()) == [
        "bad-8",
        "other",
        "run-1",
        *(f"run-{n}" for n in range(3, 9)),
    ]
    deleted = [*(f"bad-{n}" for n in range(1, 8)), "run-2"]
    assert sorted(report.as_dict()["runs"]) == deleted
    assert report.summary.startswith("5 versions and 8 runs deleted, ") and report.freed_bytes > 300
    again = clean_up(registry, "names", 3, "runs", "pets")
    assert again.summary == "0 versions and 0 runs deleted, 0 B freed"
