"""A retraining: its output, its runs and its end."""

from __future__ import annotations

import dataclasses
import json
import queue
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from ddptrain.config.load import load_mapping
from ddptrain.driver.control.signals import signals_to
from ddptrain.errors import Interrupted, RunLocked
from ddptrain.model_registry.records import RegistryDamaged, VersionRecord
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.model_registry.retrainings import GateOutcome, RetrainRecord, RetrainRecords, RetrainStatus, Stage
from ddptrain.results.run import Run
from ddptrain.results.run_record import RunRecord
from ddptrain.retrain.clean_up import clean_up, protected_runs
from ddptrain.retrain.evaluation import Evaluation
from ddptrain.retrain.retraining import Retraining, scores_text
from ddptrain.retrain.start import ModelLock, RetrainOptions, StageOutput
from tests.servers.notify_servers import CheckServer, serving


def test_signal_that_nobody_has_handled_reaches_an_inner_receiver() -> None:
    with signals_to(queue.SimpleQueue()) as outer:
        signal.raise_signal(signal.SIGTERM)
        with signals_to(queue.SimpleQueue()) as inner:
            assert inner.taken == [signal.SIGTERM]
        assert outer.taken == [signal.SIGTERM]


# --- The clean-up deletes old versions and runs, and leaves what any model uses ---


def put(run_id: str, day: int, status: str = "succeeded", name: str = "pets") -> None:
    layout = Run(Path("runs") / run_id)
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
    registry.set_alias("others", "night", other.version)

    report = clean_up(registry, "names", 3, "runs", "pets")
    assert report.versions == (1, 2, 3, 4, 5) and report.kept == (6, 7, 8)
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


# --- What a user, or a program, sees of the stages ---


def test_lines_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    out = StageOutput(as_json=False)
    out.stage(Stage.LOCK, "model names in models")
    out.notice("two\nlines \x1b[31mred")
    out.end("retrain names promoted: version 1", {})
    shown = capsys.readouterr()
    assert shown.err.splitlines()[:2] == ["ddptrain: lock: model names in models", "ddptrain: two"]
    assert "\x1b" not in shown.err
    assert shown.out == "retrain names promoted: version 1\n"


def test_last_object_contains_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    out = StageOutput(as_json=True)
    out.stage(Stage.LOCK, "model names in models", continued=False)
    out.stage(Stage.GATE, "rejected", conditions=(GateOutcome("val/loss", False, "NaN", float("nan")),))
    out.end("unused", {"status": "rejected", "exit_code": 7})
    *stages, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["event"], each["stage"]) for each in stages] == [("retrain_stage", "lock"), ("retrain_stage", "gate")]
    assert last["event"] == "retrain_finished" and last["exit_code"] == 7
    assert [each["stage"] for each in last["stages"]] == ["lock", "gate"]
    assert last["stages"][1]["conditions"] == [
        {"metric": "val/loss", "passed": False, "reason": "NaN", "candidate": None, "champion": None}
    ]


# --- The runs of versions in use, and of an unfinished retraining, are protected from cleanups ---


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    registry = ModelRegistry.open(str(tmp_path / "models"))
    for number in range(1, 6):
        record = VersionRecord("", 0, "", f"run-{number}", "petnames", 1, {}, ())
        registry.add_version("names", {"weights": b"w"}, record)
    return registry


def put_protected_runs(registry: ModelRegistry, run_id: str, status: RetrainStatus, **fields: object) -> None:
    records = RetrainRecords(registry.folder, "names")
    made = records.create(RetrainRecord(0, "names", "2025-01-01T00:00:00Z", run_id))
    records.update(dataclasses.replace(made, status=status, **fields))  # type: ignore[arg-type]


def test_runs_of_versions_with_an_alias_are_protected(registry: ModelRegistry) -> None:
    assert protected_runs(registry) == {}
    registry.promote("names", 1)
    registry.promote("names", 2)
    registry.set_alias("names", "staging", 3)
    assert protected_runs(registry) == {
        "run-1": "previous of names",
        "run-2": "champion of names",
        "run-3": "staging of names",
    }


@pytest.mark.parametrize("status", list(RetrainStatus))
def test_run_of_an_unfinished_retraining_is_protected(registry: ModelRegistry, status: RetrainStatus) -> None:
    put_protected_runs(registry, "night", status)
    continues = status in {"running", "deadline", "interrupted"}
    assert protected_runs(registry) == ({"night": "retraining 1 of names is not finished"} if continues else {})


def test_run_that_failed_after_its_training_is_protected_until_another_retraining(registry: ModelRegistry) -> None:
    put_protected_runs(registry, "trained", RetrainStatus.FAILED, stage=Stage.TRAIN, exit_code=1)
    assert protected_runs(registry).keys() == {"trained"}
    put_protected_runs(registry, "given-up", RetrainStatus.ABANDONED)
    assert protected_runs(registry).keys() == {"trained"}
    put_protected_runs(registry, "newer", RetrainStatus.PROMOTED)
    assert protected_runs(registry) == {}


def test_runs_of_all_running_retrainings_are_protected(registry: ModelRegistry) -> None:
    put_protected_runs(registry, "one", RetrainStatus.RUNNING)
    put_protected_runs(registry, "two", RetrainStatus.RUNNING)
    put_protected_runs(registry, "done", RetrainStatus.REJECTED)
    assert protected_runs(registry).keys() == {"one", "two"}


def test_damaged_registry_is_an_error_so_that_nothing_is_deleted(registry: ModelRegistry, tmp_path: Path) -> None:
    registry.promote("names", 1)
    for file in (tmp_path / "models/names/history").iterdir():
        file.write_text("{")
    with pytest.raises(RegistryDamaged, match="is damaged"):
        protected_runs(registry)


def test_no_registry_protects_nothing(tmp_path: Path) -> None:
    assert protected_runs(ModelRegistry.open(str(tmp_path / "none"))) == {}


def test_scores_in_one_line() -> None:
    scores = Evaluation({"candidate": {"b": 2.0, "a": 0.123456}, "champion": {"b": 3.0}}, notes=("noted",))
    assert scores_text(scores) == "a 0.1235, b 2 (champion 3); noted"
    assert scores_text(Evaluation({"candidate": {}})) == "no metrics"


def test_start_that_has_lost_its_model_ends_with_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(ModelLock):
        """A lock that another process takes."""

        def held(self, *_: object) -> NoReturn:
            self.lost = RunLocked("process 12 on host has taken over")
            raise Interrupted(signal.SIGTERM)

    monkeypatch.chdir(tmp_path)
    with serving(check := CheckServer()):
        sections = {"notify": {"heartbeat": check.url}, "retrain": {"model": "names", "gate": {"metric": "val/loss"}}}
        start = Retraining(load_mapping({"workload": "petnames", **sections}, tmp_path), RetrainOptions())
        start.lock = Lost(start.registry.folder, "names")
        start.heartbeat.begin()
        assert start.run() == 6
    assert [(kind, "has taken over" in body) for kind, _, body in check.pings] == [("start", False), ("log", True)]
