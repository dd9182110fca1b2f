"""The record of a start, and which retraining it continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.sections.retraining import RetrainConfig
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.notify.heartbeat import Heartbeat
from ddptrain.retrain import retraining
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


def other_start(start: Start) -> Start:
    folder = start.registry.folder
    return replace(
        start,
        records=RetrainRecords(folder, "names"),
        owner=ModelOwner(folder, "names"),
        record=None,
        earlier=start.records.newest(50),
    )
