from __future__ import annotations

import time
from pathlib import Path

import pytest

from ddptrain.protocol import events
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.rank_identity import RankIdentity
from ddptrain.rank.steps.timed_activities import TimedActivities
from tests.support import fake_time
from tests.unit.specs import make_spec


class Activities(TimedActivities):
    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank
        path.touch()
        self._file = path.open("ab")
        self._emitter = Emitter(self._file.fileno())

    @property
    def rank(self) -> int:
        return self._rank

    def told(self) -> list[events.Event]:
        self._file.close()
        return [events.decode(line) for line in self._path.read_bytes().splitlines()]


def test_rank_0_reports_how_long_a_block_took(tmp_path: Path) -> None:
    activities = Activities(tmp_path / "events", 0)
    with activities.timed("evaluation"):
        time.sleep(0.02)
    (event,) = activities.told()
    assert isinstance(event, events.Timed) and event.activity == "evaluation" and event.seconds >= 0.02


def test_a_block_that_raises_is_reported(tmp_path: Path) -> None:
    activities = Activities(tmp_path / "events", 0)

    def fail() -> None:
        time.sleep(0.02)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), activities.timed("evaluation"):
        fail()
    assert len(activities.told()) == 1


def test_short_blocks_and_other_ranks_are_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    activities = Activities(tmp_path / "events", 1)
    with activities.timed("evaluation"):
        time.sleep(0.02)
    assert activities.told() == []
    activities = Activities(tmp_path / "events", 0)
    fake_time.replace(monkeypatch, "monotonic", lambda: 5.0)
    with activities.timed("checkpoint"):
        pass
    assert activities.told() == []


@pytest.mark.parametrize(("seconds", "reported"), [(0.0099, []), (0.01, [0.01]), (2.0, [2.0])])
def test_a_hundredth_of_a_second_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, reported: list[float]
) -> None:
    now = [0.0]
    fake_time.replace(monkeypatch, "monotonic", lambda: now[0])
    activities = Activities(tmp_path / "events", 0)
    with activities.timed("checkpoint"):
        now[0] = seconds
    assert [event.seconds for event in activities.told() if isinstance(event, events.Timed)] == reported


def test_rank_knows_its_place_and_its_folders() -> None:
    identity = RankIdentity()
    place = {"rank": 5, "world_size": 8, "local_rank": 1, "local_world_size": 4, "node_rank": 2}
    identity._spec = make_spec(run_id="r-7", attempt=3, **place)
    found = (identity.rank, identity.world_size, identity.local_rank, identity.local_world_size, identity.node_rank)
    assert found == (5, 8, 1, 4, 2)
    assert (identity.run_id, identity.attempt) == ("r-7", 3)
    assert identity.inputs is None and identity.resume_folder is None
    prepared = RankIdentity()
    prepared._spec = make_spec(inputs="/in", resume_from="/runs/r-7/step-3")
    assert (prepared.inputs, prepared.resume_folder) == (Path("/in"), Path("/runs/r-7/step-3"))
