"""The records of retrainings in a folder."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ddptrain.model_registry.own_folder import OwnFolder
from ddptrain.model_registry.records import RegistryDamaged
from ddptrain.model_registry.retrainings import GateOutcome, RetrainRecord, RetrainRecords, RetrainStatus, Stage
from ddptrain.storage.store import StoreError

RECORD = RetrainRecord(
    number=0,
    model="names",
    started_at="2026-03-01T03:00:00.000Z",
    run_id="names-1",
    stage=Stage.GATE,
    difference=("+3 images",),
    scores={"candidate": {"val/loss": 2.0}, "champion": {"val/loss": 2.5}},
    gate=(GateOutcome("val/loss", True, "better", 2.0, 2.5),),
    champion=1,
)


@pytest.fixture
def records(tmp_path: Path) -> RetrainRecords:
    return RetrainRecords(OwnFolder(tmp_path / "models"), "names")


def test_record_is_read_as_it_was_written(records: RetrainRecords) -> None:
    written = records.create(RECORD)
    assert written == replace(RECORD, number=1)
    assert records.newest(10) == [written] and records.read(1) == written


def test_newest_come_first(records: RetrainRecords) -> None:
    for _ in range(3):
        records.create(RECORD)
    assert [each.number for each in records.newest(2)] == [3, 2]


def test_folder_that_cannot_be_listed_is_not_taken_as_empty(
    records: RetrainRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    records.create(RECORD)

    def refuse(path: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StoreError, match="can't be listed: Input/output error"):
        records.newest(1)


def test_update_replaces_the_record(records: RetrainRecords) -> None:
    written = records.create(RECORD)
    records.update(replace(written, status=RetrainStatus.PROMOTED, stage=Stage.PROMOTE))
    assert [(each.status, each.stage) for each in records.newest(5)] == [("promoted", "promote")]


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"number": "x"}', b"\xff"])
def test_damaged_record_is_named(records: RetrainRecords, tmp_path: Path, data: bytes) -> None:
    records.create(RECORD)
    (tmp_path / "models" / "names" / "retrainings" / "000001.json").write_bytes(data)
    with pytest.raises(RegistryDamaged, match=r"retrainings/000001.json is damaged"):
        records.newest(1)


def test_missing_record_is_named(records: RetrainRecords) -> None:
    with pytest.raises(RegistryDamaged, match=r"000007.json is missing"):
        records.read(7)


def test_field_of_a_newer_version_is_ignored() -> None:
    data = RECORD.to_json().replace(b'"model"', b'"later": 1,\n "model"')
    assert RetrainRecord.from_json(data, "x") == RECORD


def test_old_records_go_but_those_of_versions_and_unfinished_ones_stay(
    records: RetrainRecords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddptrain.model_registry.retrainings._KEPT_RECORDS", 2)
    rejected = replace(RECORD, status=RetrainStatus.REJECTED)
    for version in (1, 2, None, None, 5, 6):
        records.create(replace(rejected, version=version))
    records.update(replace(RECORD, number=4, status=RetrainStatus.RUNNING))
    folder = tmp_path / "models" / "names" / "retrainings"
    (folder / "000003.json").write_bytes(b"damaged")
    records.remove_older({2, 5})
    assert sorted(path.name for path in folder.iterdir()) == [f"00000{number}.json" for number in (2, 3, 4, 5, 6)]
    assert records.create(rejected).number == 7


@pytest.mark.parametrize(
    "change",
    [
        {"started_at": "yesterday"},
        {"started_at": "2026-03-01T03:00:00"},
        {"ended_at": "soon"},
        {"stage": "evil"},
        {"run_id": "../../of-another-user"},
        {"run_id": "/tmp/evil"},
        {"number": -1},
    ],
    ids=str,
)
def test_record_with_values_that_no_retraining_writes_is_damaged(change: dict[str, object]) -> None:
    data = replace(RECORD, **{"number": 1, **change}).to_json()  # type: ignore[arg-type]
    with pytest.raises(RegistryDamaged, match="the record is damaged"):
        RetrainRecord.from_json(data, "the record")
