"""The record of a start, and which retrainings other processes work on."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddptrain.config.resolved import ResolvedConfig
from ddptrain.config.sections.retraining import RetrainConfig
from ddptrain.model_registry.registry import ModelRegistry
from ddptrain.notify.heartbeat import Heartbeat
from ddptrain.results.ownership import run_lock
from ddptrain.retrain import retraining
from ddptrain.retrain.fingerprint import DataFile, DataListing
from ddptrain.retrain.ownership import ModelOwner
from ddptrain.retrain.records import RetrainRecord, RetrainRecords, RetrainStatus
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


def test_only_runs_with_a_driver_are_of_others(start: Start, tmp_path: Path) -> None:
    started = "2026-01-01T00:00:00.000Z"
    start.earlier = [RetrainRecord(number, "names", started, run_id=f"run-{number}") for number in (3, 2, 1)]
    for number in (1, 2):
        folder = tmp_path / "runs" / f"run-{number}"
        folder.mkdir(parents=True)
        record = {"run_id": folder.name, "status": "running", "started_at": started, "name": "names"}
        (folder / "run.json").write_text(json.dumps(record))
    descriptor = run_lock.take(tmp_path / "runs" / "run-2" / "run.lock")
    try:
        assert Retraining(start)._trained_by_others() == [2]
    finally:
        os.close(descriptor)
