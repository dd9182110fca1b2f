"""Whatever a tracker does, it does to itself alone: not to training, nor to the others, nor to the end of the run."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddptrain.tracking.protocol import Checkpoint, Image
from ddptrain.tracking.trackers import TrackerManager
from tests.support.command import wait_until
from tests.unit.tracking.trackers import Failing, Hanging, House, Late, Recorder, numbers


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.close()


def finish(manager: TrackerManager, within_s: float = 3_600.0) -> float:
    """Have it finish; how long that took."""
    began = time.monotonic()
    manager.end("finished", within_s)
    manager.wait()
    return time.monotonic() - began


def test_every_tracker_gets_everything_in_order_in_one_thread_of_its_own(house: House) -> None:
    first, second = Recorder(), Recorder()
    manager = house.open(first, second)
    for step in range(500):
        manager.put(numbers(step))
    manager.end("failed")
    manager.end("finished")
    manager.wait()
    manager.put(numbers(500))
    assert first.steps == second.steps == list(range(500))
    assert first.states == second.states == ["failed"]  # what is said first
    assert len(first.threads) == len(second.threads) == 1
    assert len(first.threads | second.threads | {threading.get_ident()}) == 3
    assert house.told == []


def test_three_failures_in_a_row_turn_a_tracker_off_with_one_warning(house: House) -> None:
    bad, good = Failing(None, ConnectionResetError("gone")), Recorder()
    manager = house.open(bad, good)
    for step in range(100):
        manager.put(numbers(step))
    wait_until(lambda: bool(house.warnings))
    finish(manager)
    assert bad.calls == 3
    assert good.steps == list(range(100))
    assert house.warnings == [
        "failing has failed 3 times in a row: ConnectionResetError: gone; it is off, the run directory has everything"
    ]
    assert bad.states == ["finished"]


def test_single_failures_are_tolerated_and_told_once_at_the_end(house: House) -> None:
    bad = Failing({1, 2, 5}, SystemExit("whatever a library thinks of"))
    manager = house.open(bad)
    for step in range(8):
        manager.put(numbers(step))
    finish(manager)
    assert bad.steps == [0, 3, 4, 6, 7]
    (warning,) = house.warnings
    assert "failed to take 3 of 8 items: SystemExit" in warning


def test_what_a_slow_tracker_has_no_room_for_is_dropped_counted_and_told(house: House) -> None:
    slow, quick = Hanging("log"), Recorder()
    manager = house.open(slow, quick, queue=10)
    manager.put(numbers(0))
    wait_until(lambda: bool(slow.items and quick.items))
    for steps in (range(1, 11), range(11, 21), range(21, 31)):
        for step in steps:
            manager.put(numbers(step))
        wait_until(lambda last=steps[-1]: last in quick.steps)  # type: ignore[misc]
    slow.gate.set()
    finish(manager)
    assert slow.steps == list(range(11))
    assert quick.steps == list(range(31))
    assert [text.partition(";")[0] for text in house.warnings] == [
        "hanging is too slow: 10 items are in its queue, and further ones are dropped",
        "hanging was too slow for 20 of 31 items",
    ]


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_tracker_that_hangs_is_not_waited_for_after_its_deadline(house: House, where: str) -> None:
    stuck, good = Hanging(where), Recorder()
    good.timeout_s = 60.0
    manager = house.open(stuck, good, timeout_s=0.4 if where != "finish" else 60.0)
    manager.put(numbers(0))
    wait_until(lambda: bool(good.items))
    if where == "finish":  # it has to come to that first
        manager.end("finished")
        wait_until(lambda: bool(good.states))
    wait_until(stuck.hangs.is_set)
    assert 0.3 < finish(manager, within_s=0.4 if where == "finish" else 3_600.0) < 45
    assert (good.steps, good.states) == ([0], ["finished"])
    assert manager.unfinished == ["hanging"]
    (warning,) = house.warnings
    assert f"({where}ing" in warning.replace("logging", "loging")
    assert "does not wait any longer" in warning
    waits = []
    for _ in range(5):
        again = time.monotonic()
        manager.wait()  # the thread that hears of the worker group's end waits as well
        waits.append(time.monotonic() - again)
    assert min(waits) < 0.3


@pytest.mark.parametrize("tells_first", [True, False])
def test_tracker_that_is_late_at_its_end_is_reported_once(house: House, tells_first: bool) -> None:
    late = Late(tells_first)
    manager = house.open(late, timeout_s=60.0)
    manager.end("finished")
    wait_until(late.hangs.is_set)
    finish(manager, within_s=0.2)
    late.gate.set()
    wait_until(late.has_finished.is_set)
    assert manager.unfinished == ["late"]
    assert house.lines == (["not everything was sent"] if tells_first else [])
    warnings = [text.partition(";")[0] for text in house.warnings]
    assert warnings == ([] if tells_first else ["late has not ended in time (finishing)"])
    assert [failure.message for failure in house.failures] == ["has not ended in time (finishing)"]


def test_time_for_the_end_can_be_shortened_while_it_is_waited_for(house: House) -> None:
    manager = house.open(Hanging("finish"), timeout_s=600)  # longer than a test may take
    manager.end("finished")
    threading.Timer(0.3, lambda: manager.end("crashed", 0.1)).start()
    manager.wait()
    assert manager.unfinished == ["hanging"]


def test_tracker_that_cannot_start_is_off_and_says_why(house: House) -> None:
    class Absent(Recorder):
        def start(self, facts: object) -> None:
            raise ImportError("No module named 'wandb'")

    absent, good = Absent(), Recorder()
    manager = house.open(absent, good)
    wait_until(lambda: bool(house.warnings))
    manager.put(numbers(0))
    finish(manager)
    assert (absent.items, absent.states) == ([], [])
    assert good.steps == [0]
    (warning,) = house.warnings
    assert warning.startswith("absent could not start: ImportError: No module named 'wandb'; it is off")
    assert [failed.tracker for failed in house.failures] == ["absent"]


def test_file_that_is_lent_outlives_the_ranks_own_until_all_trackers_have_read_it(house: House, tmp_path: Path) -> None:
    class Reader(Recorder):
        def log(self, item: object) -> None:
            assert isinstance(item, Image)
            self.read = item.path.read_bytes()

    readers = [Reader(), Reader()]
    manager = house.open(*readers)
    source = tmp_path / "file-1.png"
    source.write_bytes(b"picture")
    lent = manager.keep(source)
    source.unlink()  # the driver has taken it home
    manager.put_with_files(Image(1, "examples", lent), lent)
    wait_until(lambda: not lent.exists())
    finish(manager)
    assert [reader.read for reader in readers] == [b"picture", b"picture"]
    assert not (tmp_path / "lent").exists()


def test_file_system_without_hard_links_gets_a_copy(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a").write_bytes(b"x")
    kept = house.open(Recorder()).keep(tmp_path / "a", ".png")
    assert (kept.suffix, kept.read_bytes()) == (".png", b"x")
    assert kept.stat().st_ino != (tmp_path / "a").stat().st_ino


def test_checkpoint_is_lent_as_a_folder(house: House, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Reader(Recorder):
        def log(self, item: object) -> None:
            assert isinstance(item, Checkpoint)
            seen.append(sorted(path.name for path in item.folder.iterdir()))

    manager = house.open(Reader())
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    for name in ("model.safetensors", "state.pt"):
        (folder / name).write_bytes(b"x")
    lent = manager.keep(folder)
    manager.put_with_files(Checkpoint(1, 5, lent, {}), lent)
    finish(manager)
    assert seen == [["model.safetensors", "state.pt"]]


def test_forked_child_hands_nothing_to_trackers_and_ends_none(house: House) -> None:
    recorder = Recorder()
    manager = house.open(recorder)

    def child() -> None:
        manager.put(numbers(1))
        manager.end("crashed")
        manager.wait()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    manager.put(numbers(2))
    finish(manager)
    assert (recorder.steps, recorder.states) == ([2], ["finished"])


def test_folder_that_a_tracker_may_write_into_is_there(tmp_path: Path) -> None:
    house, tracker = House(tmp_path / "run" / "tracking"), Recorder()
    house.open(tracker)
    wait_until(lambda: tracker.facts is not None)
    house.close()
    assert (tmp_path / "run" / "tracking").is_dir()
