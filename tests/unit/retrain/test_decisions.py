"""What a start does, given the records of earlier ones."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from ddptrain.config.sections.retraining import RetrainConfig
from ddptrain.model_registry.retrainings import RetrainRecord, RetrainStatus, Stage
from ddptrain.retrain.decisions import Choice, choose, data_problem, is_resumable, unchanged
from ddptrain.retrain.fingerprint import TrainingData

CONFIG, DATA = "config", "data"
NOW = datetime(2026, 3, 10, 3, 0, tzinfo=UTC)


def record(number: int = 1, status: str = RetrainStatus.PROMOTED, **fields: Any) -> RetrainRecord:
    defaults: dict[str, Any] = {"started_at": "2026-03-09T03:00:00.000Z", "ended_at": "2026-03-09T04:00:00.000Z"}
    base: dict[str, Any] = {"number": number, "model": "m", "status": status, "config": CONFIG, "data": DATA}
    return RetrainRecord(**(base | defaults | fields))


@pytest.mark.parametrize(
    ("status", "fields", "expected"),
    [
        (RetrainStatus.RUNNING, {}, True),  # killed: this start has the lock
        (RetrainStatus.DEADLINE, {"exit_code": 8}, True),
        (RetrainStatus.INTERRUPTED, {"exit_code": 75}, True),
        (RetrainStatus.PROMOTED, {}, False),
        (RetrainStatus.REJECTED, {}, False),
        (RetrainStatus.UNCHANGED, {}, False),
        (RetrainStatus.ABANDONED, {}, False),
        (RetrainStatus.FAILED, {"exit_code": 1, "stage": Stage.CHECK_DATA}, False),  # the training's own code
        (RetrainStatus.FAILED, {"exit_code": 2, "stage": Stage.NONE}, False),  # the data look wrong
        (RetrainStatus.FAILED, {"exit_code": 3, "stage": Stage.CHECK_DATA}, False),
        (RetrainStatus.FAILED, {"exit_code": 4, "stage": Stage.CHECK_DATA}, True),  # the cluster was lost
        (RetrainStatus.FAILED, {"exit_code": 5, "stage": Stage.CHECK_DATA}, True),
        (RetrainStatus.FAILED, {"exit_code": 6, "stage": Stage.CHECK_DATA}, True),
        (RetrainStatus.FAILED, {"exit_code": 1, "stage": Stage.TRAIN}, True),  # finished training is not repeated
        (RetrainStatus.FAILED, {"exit_code": 2, "stage": Stage.GATE}, True),
        (RetrainStatus.FAILED, {"exit_code": 4, "stage": Stage.CHECK_DATA, "starts": 10}, False),
        (RetrainStatus.FAILED, {"exit_code": 1, "stage": Stage.TRAIN, "starts": 10}, False),
    ],
)
def test_what_a_later_start_continues(status: str, fields: dict[str, Any], expected: bool) -> None:
    assert is_resumable(record(status=status, **fields)) is expected


def test_first_start_begins() -> None:
    assert choose([], CONFIG, "", force=False) == Choice()


def test_killed_one_is_continued_also_with_force() -> None:
    killed = record(2, RetrainStatus.RUNNING)
    for force in (False, True):
        assert choose([killed, record(1)], CONFIG, "", force=force).continued == killed


def test_killed_one_with_another_configuration_is_abandoned() -> None:
    killed = record(2, RetrainStatus.RUNNING)
    assert choose([killed], "other", "", force=False) == Choice(abandoned=killed)


def test_only_the_last_retraining_is_continued() -> None:
    old = record(1, RetrainStatus.RUNNING)
    assert choose([record(2), old], CONFIG, "", force=False) == Choice()


def test_abandoned_ones_are_passed_over() -> None:
    killed = record(2, RetrainStatus.RUNNING)
    assert choose([record(3, RetrainStatus.ABANDONED), killed], CONFIG, "", force=False).continued == killed


def test_starts_that_never_got_the_model_are_passed_over() -> None:
    killed = record(2, RetrainStatus.RUNNING)
    for waited in (record(3, RetrainStatus.FAILED, exit_code=6, config=""), record(3, "interrupted", config="")):
        assert choose([waited, killed], CONFIG, "", force=False).continued == killed
        assert choose([waited, record(1)], CONFIG, "", force=False) == Choice()
    waited = record(3, RetrainStatus.FAILED, exit_code=6, config="", slot=SLOT)
    assert choose([waited, record(1)], CONFIG, SLOT, force=False) == Choice()


SLOT, EARLIER, LATER = "2026-03-09T03:00:00Z", "2026-03-08T03:00:00Z", "2026-03-10T03:00:00Z"


@pytest.mark.parametrize("status", ["promoted", "rejected", "unchanged", "failed"])
def test_slot_runs_once_however_it_ended(status: str) -> None:
    done = record(4, status, slot=SLOT, exit_code=1 if status == "failed" else 0)
    skip = choose([done], CONFIG, SLOT, force=False).skip
    assert skip == f"the scheduled time {SLOT} is done: retraining 4 of {SLOT} {status}"
    assert choose([done], CONFIG, EARLIER, force=False).skip  # a late start of an earlier time
    assert choose([done], CONFIG, LATER, force=False) == Choice()
    assert choose([done], CONFIG, "", force=False) == Choice()  # a start by hand
    assert choose([done], CONFIG, SLOT, force=True) == Choice()


def test_slot_that_was_interrupted_is_continued() -> None:
    stopped = record(4, RetrainStatus.INTERRUPTED, slot=SLOT)
    assert choose([stopped], CONFIG, SLOT, force=False).continued == stopped
    assert choose([stopped], CONFIG, LATER, force=False).continued == stopped


def test_slot_counts_if_a_start_by_hand_came_later() -> None:
    assert choose([record(5), record(4, slot=SLOT)], CONFIG, SLOT, force=False).skip


SETTINGS = RetrainConfig(model="m")


def why(
    records: list[RetrainRecord], champion: int | None, settings: RetrainConfig = SETTINGS, data: str = DATA
) -> str:
    return unchanged(records, champion, CONFIG, data, settings)


def test_nothing_to_do_if_the_champion_is_of_the_same_data() -> None:
    assert why([record(1, version=3)], 3) == "data, params and code are those of version 3, the champion"


@pytest.mark.parametrize(
    ("records", "champion"),
    [
        ([], None),
        ([record(1, version=3, data="other")], 3),
        ([record(1, version=3, config="other")], 3),
        ([record(1, RetrainStatus.FAILED, version=None)], None),
        ([record(1, RetrainStatus.UNCHANGED, version=None)], 3),
        ([record(2, RetrainStatus.INTERRUPTED)], 1),
    ],
)
def test_trains_if_nothing_says_that_it_is_the_same(records: list[RetrainRecord], champion: int | None) -> None:
    assert why(records, champion) == ""


def test_rejected_data_are_not_trained_again_unless_the_champion_has_changed() -> None:
    rejected = record(2, RetrainStatus.REJECTED, version=4, champion=3)
    assert why([rejected], 3) == "data, params and code are those of version 4, which the gate has rejected"
    assert why([rejected], 2) == ""
    assert why([rejected], 4) == "data, params and code are those of version 4, the champion"  # promoted by hand


def test_first_version_that_was_rejected_is_not_trained_again() -> None:
    assert "rejected" in why([record(1, RetrainStatus.REJECTED, version=1, champion=None)], None)


def test_version_that_was_rolled_back_is_not_made_again() -> None:
    records = [record(2, version=2), record(1, version=1, data="earlier")]
    assert why(records, 1) == "data, params and code are those of version 2, which is not the champion any more"


def test_data_that_are_again_as_they_were_before_the_champion_are_trained() -> None:
    records = [record(2, version=2, data="newer"), record(1, version=1)]
    assert why(records, 2) == ""


def test_champion_counts_also_if_another_training_came_later() -> None:
    forced = record(2, RetrainStatus.REJECTED, version=2, champion=1, config="other")
    assert "the champion" in why([forced, record(1, version=1)], 1)


def test_if_unchanged_train_trains() -> None:
    assert why([record(1, version=3)], 3, RetrainConfig(model="m", if_unchanged="train")) == ""


def one_file(size_bytes: int) -> TrainingData:
    return TrainingData("", 1, size_bytes, (".",), "file")


def images(**counts: int) -> TrainingData:
    return TrainingData("", sum(counts.values()), 10 * sum(counts.values()), tuple(sorted(counts)), "image")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (None, images(cat=3), ""),
        (images(cat=3), images(cat=3), ""),
        (None, images(), "there are no training data"),
        (images(cat=3), images(), "there are no training data"),
        (images(cat=100), images(cat=50), ""),
        (images(cat=100), images(cat=49), "shrunk from 100 to 49 images, to less than half"),
        (images(cat=100, dog=5), images(cat=100), "class dog has no images any more"),
        (images(cat=100, dog=5, pug=2), images(cat=100), "classes have no images any more: dog, pug"),
        (images(cat=100), images(cat=100, dog=5), ""),
        (one_file(1000), one_file(400), "from 1,000 to 400 bytes"),
        (one_file(1000), one_file(600), ""),
    ],
)
def test_data_that_look_wrong(old: TrainingData | None, new: TrainingData, problem: str) -> None:
    about: dict[str, Any] = (
        {} if old is None else {"n_files": old.n_files, "size_bytes": old.size_bytes, "classes": old.classes}
    )
    before = record(1, **about) if about else None
    found = data_problem(before, new, has_sources=True)
    assert problem in found
    assert bool(problem) == bool(found)


def test_configuration_without_sources_has_no_data_to_check() -> None:
    assert data_problem(None, images(), has_sources=False) == ""
