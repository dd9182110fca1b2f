"""A rank's trackers over its life: what they get, how long they may take, and where their files go."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddptrain.config.rank_settings import TrackerSpec
from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import TrackingSpec
from ddptrain.rank.output import Emitter
from ddptrain.rank.trackers import RankTrackers
from ddptrain.tracking.protocol import Checkpoint, Image, Numbers
from tests.unit.specs import make_spec
from tests.unit.tracking.trackers import Hanging, House, Recorder


class Rank:
    """The trackers of a rank without a run directory in sight, and the events that they cause."""

    def __init__(self, folder: Path, tracking_folder: str = "") -> None:
        self.folder = folder
        self._file = (folder / "events").open("ab", buffering=0)
        spec = make_spec(staging=str(folder), tracking=TrackingSpec((TrackerSpec("a:B"),), folder=tracking_folder))
        self.tracked = RankTrackers(spec, Emitter(self._file.fileno()))
        self.house = House(folder / "tracking")

    def begin(self, *recorders: Recorder, **options: Any) -> None:
        self.tracked.manager = self.house.open(*recorders, **options)

    @property
    def events(self) -> list[events.Event]:
        told = [events.decode(line) for line in (self.folder / "events").read_bytes().splitlines()]
        return [event for event in told if not isinstance(event, events.Timed)]  # they depend on the machine's speed

    def close(self) -> None:
        if self.tracked.manager is not None:
            self.house.close()
        self._file.close()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.close()


def test_items_reach_the_trackers_and_a_checkpoint_survives_its_move(rank: Rank, tmp_path: Path) -> None:
    reader = Recorder()
    rank.begin(reader)
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "model").write_bytes(b"weights")
    assert rank.tracked.wants(Checkpoint)
    rank.tracked.numbers(events.Metrics(5, {"loss": 0.5}, 3, 0.25))
    rank.tracked.checkpoint(3, tmp_path / "step-3", {"val/loss": 1.0})
    rank.tracked.finish("finished")
    numbers, checkpoint = reader.items
    assert numbers == Numbers(5, {"loss": 0.5}, 3, 0.25)
    assert isinstance(checkpoint, Checkpoint)
    assert (checkpoint.step, checkpoint.metrics) == (3, {"val/loss": 1.0})
    assert reader.states == ["finished"]


def test_rank_without_trackers_wants_nothing(tmp_path: Path) -> None:
    with (tmp_path / "events").open("ab", buffering=0) as file:
        tracked = RankTrackers(make_spec(staging=str(tmp_path)), Emitter(file.fileno()))
        tracked.begin()
        tracked.numbers(events.Metrics(1, {"loss": 0.5}, 1, None))
        tracked.checkpoint(1, tmp_path, {})
        tracked.put(Image(1, "x", tmp_path))
        tracked.hurry(0.0)
        tracked.bound_exit(1)
        assert not tracked.wants(Numbers)
        tracked.finish("finished")
    assert (tmp_path / "events").read_bytes() == b""


def test_rank_that_is_told_to_end_while_it_finishes_ends_sooner(rank: Rank) -> None:
    rank.begin(Hanging("finish"), timeout_s=60.0)
    rank.tracked.end("finished")
    rank.tracked.hurry(0.0)
    began = time.monotonic()
    rank.tracked.finish("finished")
    assert time.monotonic() - began < 30
    (finishing,) = [event for event in rank.events if isinstance(event, events.Finishing)]
    assert finishing.timeout_s == pytest.approx(1.5, abs=0.11), "half a second, and a second for the rank itself"


def test_files_are_sent_to_the_driver_once_if_the_run_directory_is_not_in_sight(rank: Rank, tmp_path: Path) -> None:
    rank.begin(Recorder())
    (tmp_path / "tracking" / "deep").mkdir(parents=True)
    (tmp_path / "tracking" / "deep" / "curve").write_bytes(b"numbers")
    (tmp_path / "tracking" / "link").symlink_to("/etc/passwd")
    rank.tracked.finish("finished")
    rank.tracked.finish("finished")
    (saved,) = [event for event in rank.events if isinstance(event, events.FileSaved)]
    assert (saved.path, saved.size_bytes, saved.area) == ("deep/curve", 7, "tracking")
    assert (tmp_path / saved.staging).read_bytes() == b"numbers"


def test_files_in_the_run_directory_stay_there(tmp_path: Path) -> None:
    rank = Rank(tmp_path, str(tmp_path / "tracking"))
    rank.begin(Recorder())
    (tmp_path / "tracking").mkdir(exist_ok=True)
    (tmp_path / "tracking" / "curve").write_bytes(b"numbers")
    rank.tracked.finish("finished")
    assert not [event for event in rank.events if isinstance(event, events.FileSaved)]
    rank.close()


_HANGS_AT_EXIT = """
import atexit, time
from types import SimpleNamespace
from ddptrain.protocol.events import Note
from ddptrain.rank import trackers
from tests.unit.specs import make_spec
trackers._EXIT_HANDLERS_S = 0.2
tracked = trackers.RankTrackers(make_spec(staging="/tmp"), None)
tracked.manager = SimpleNamespace(unfinished=["wandb"])
atexit.register(time.sleep, 600)
print("flushed")
tracked.bound_exit(75)
"""


def test_exit_handler_that_hangs_does_not_hold_the_process_up() -> None:
    command = [sys.executable, "-c", _HANGS_AT_EXIT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=dict(os.environ), check=False)
    assert (done.returncode, done.stdout) == (75, "flushed\n"), done.stderr
