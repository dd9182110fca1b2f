"""The record of a start, and which retraining it continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.sections.retraining import RetrainConfig
from ddptrain.errors import RunNotFound, UsageError
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.notify.heartbeat import Heartbeat
from ddptrain.retrain import retraining
from ddptrain.retrain import start as module_of_start
from ddptrain.retrain.fingerprint import DataFile, DataListing
from ddptrain.retrain.ownership import ModelOwner
from ddptrain.retrain.plan import Choice
from ddptrain.retrain.records import RetrainRecord, RetrainRecords, RetrainStatus, Stage
from ddptrain.retrain.retraining import Retraining, check_data
from ddptrain.retrain.start import RetrainOptions, StageOutput, Start


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """A start that needs no lock."""
    settings = RetrainConfig.model_validate({"model": "names", "overlap": "allow"})
    config = SimpleNamespace(
        name="names",
        script=None,
        params={},
        storage=SimpleNamespace(options={}),
        workload="own:train",
        models=SimpleNamespace(dir=str(tmp_path / "models")),
        retrain=settings,
        data=SimpleNamespace(sources=["data"], max_shrink=0.5),
        results=SimpleNamespace(dir=str(tmp_path / "runs")),
    )
    registry = ModelRegistry.open(str(tmp_path / "models"))
    return Start(
        cast(ResolvedConfig, SimpleNamespace(config=config)),
        settings,
        RetrainOptions(),
        registry,
        RetrainRecords(registry.folder, "names"),
        ModelOwner(registry.folder, "names"),
        StageOutput(as_json=False),
        Heartbeat(None),
    )


LISTING = DataListing({"data/a": DataFile(1, "x")})


def interrupted_before_its_data_were_checked(start: Start) -> None:
    record = replace(start.new_record(), config="digest", status=RetrainStatus.INTERRUPTED)
    start.digest, start.earlier = "digest", [start.records.create(record)]


def test_one_that_ended_before_its_data_were_checked_gets_a_run(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retraining, "list_data", lambda resolved, before: LISTING)
    interrupted_before_its_data_were_checked(start)
    start.resume(1)
    assert check_data(start) is None
    assert start.began.number == 1 and start.began.run_id.startswith("names-") and start.began.data == LISTING.digest


def test_one_that_ended_before_its_data_were_checked_may_have_nothing_to_do(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retraining, "list_data", lambda resolved, before: LISTING)
    interrupted_before_its_data_were_checked(start)
    trained: dict[str, Any] = {"config": "digest", "data": LISTING.digest, "run_id": "run", "version": 1}
    old = RetrainRecord(0, "names", "2026-01-01T00:00:00.000Z", status=RetrainStatus.REJECTED, **trained)
    start.earlier.append(old)
    start.resume(1)
    end = check_data(start)
    assert end is not None and end.status == RetrainStatus.UNCHANGED
    assert start.began.number == 1 and start.began.run_id == ""


def test_second_start_does_not_continue_what_another_one_evaluates(start: Start, tmp_path: Path) -> None:
    """With `overlap: allow`; the run of the first one has ended, so that its driver is not to be seen."""
    start.digest = "digest"
    start.begin("data", LISTING, None)
    start.update(stage=Stage.TRAIN)
    second = other_start(start)
    assert Retraining(second)._choose() == Choice()
    second.begin("data", LISTING, None)
    assert (start.began.number, second.began.number) == (1, 2)
    start.owner.release()
    third = other_start(start)
    continued = Retraining(third)._choose().continued
    assert continued is not None and continued.number == 1
    assert Retraining(other_start(start))._choose() == Choice()  # the third one has taken it


def test_dry_run_takes_nothing(start: Start) -> None:
    interrupted_before_its_data_were_checked(start)
    start.options = RetrainOptions(dry_run=True)
    for _ in range(2):
        continued = Retraining(start)._choose().continued
        assert continued is not None and continued.number == 1
    assert start.owner.take_record(1)
    dry = other_start(start)
    dry.options = RetrainOptions(dry_run=True)
    assert Retraining(dry)._choose() == Choice()


def test_nights_without_changes_are_one_record_that_says_when_the_last_one_was(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times of the earlier nights stay known, so that `schedule list` counts only those that were missed."""
    monkeypatch.setattr(retraining, "list_data", lambda resolved, before: LISTING)
    trained: dict[str, Any] = {"config": "digest", "data": LISTING.digest, "run_id": "run", "version": 1}
    old = RetrainRecord(0, "names", "2026-01-01T00:00:00.000Z", status=RetrainStatus.REJECTED, **trained)
    start.records.create(old)
    for night in ("02", "03", "05"):
        monkeypatch.setattr(module_of_start, "utc_now", lambda night=night: f"2026-01-{night}T03:00:01.000Z")
        each = replace(other_start(start), digest="digest", options=RetrainOptions(slot=f"2026-01-{night}T03:00:00Z"))
        end = check_data(each)
        assert end is not None
        each.records.update(replace(each.began, status=end.status))
    last = start.records.newest(5)[0]
    assert (last.number, last.starts, last.slot) == (2, 3, "2026-01-05T03:00:00Z")
    assert last.started_at == "2026-01-05T03:00:01.000Z"
    assert [skip["slot"] for skip in start.records.skips()] == ["2026-01-02T03:00:00Z", "2026-01-03T03:00:00Z"]


def test_data_are_compared_with_the_last_that_were_trained_however_many_starts_have_failed_since(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = DataListing({f"data/{n}": DataFile(1, "x") for n in range(10)})
    start.digest = "digest"
    start.begin(many.digest, many, None)
    start.records.write_listing(1, many.to_bytes())
    for _ in range(60):
        start.records.create(replace(start.new_record(), status=RetrainStatus.FAILED, config="digest"))
    monkeypatch.setattr(retraining, "list_data", lambda resolved, before: LISTING)
    with pytest.raises(UsageError, match="the training data have shrunk from 10 to 1 files"):
        check_data(other_start(start))


def test_training_is_repeated_if_its_run_was_deleted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start.begin("data", LISTING, None)
    start.update(stage=Stage.TRAIN)
    gone, trained, decided = start.began.run_id, [], []

    def train(start: Start) -> None:
        trained.append(start.began.run_id)
        start.update(stage=Stage.TRAIN)

    def decide(start: Start) -> None:
        if start.began.run_id == gone:
            raise RunNotFound(f'no run "{gone}" in runs')
        decided.append(start.began.run_id)

    monkeypatch.setattr(retraining, "train_run", train)
    monkeypatch.setattr(retraining, "decide", decide)
    retraining.train_and_decide(start)
    assert trained == decided and trained != [gone]


def other_start(start: Start) -> Start:
    folder = start.registry.folder
    return replace(
        start,
        records=RetrainRecords(folder, "names"),
        owner=ModelOwner(folder, "names"),
        record=None,
        earlier=start.records.newest(50),
    )
