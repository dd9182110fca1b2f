"""Events are whole lines, also after a full disk, and progress is sent at most ten times per second."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddptrain.protocol import events
from ddptrain.rank import output as rank_emitter
from ddptrain.rank.output import Emitter


class Bench:
    """An emitter and its file; `now` is the time, and `room` how many bytes the disk takes before it is full."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = folder / "events"
        self.file = self.path.open("ab", buffering=0)
        self.now, self.pid = 5.0, 50
        self.room: list[int] = []
        system = SimpleNamespace(getpid=lambda: self.pid, write=self._write)
        monkeypatch.setattr(rank_emitter, "os", system)
        clock = SimpleNamespace(time_ns=lambda: 7, monotonic=lambda: self.now)
        monkeypatch.setattr(rank_emitter, "time", clock)
        self.emitter = Emitter(self.file.fileno())

    def _write(self, fd: int, data: bytes) -> int:
        assert fd == self.file.fileno()
        if not self.room:
            return os.write(fd, data)
        if (size := self.room.pop(0)) == 0:
            raise OSError(28, "No space left on device")
        return os.write(fd, data[:size])

    def told(self) -> list[events.Event]:
        return [events.decode(line) for line in self.path.read_bytes().splitlines()]

    def progress(self) -> list[tuple[float, float | None, str]]:
        told = [event for event in self.told() if isinstance(event, events.Progress)]
        return [(event.done, event.total, event.unit) for event in told]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(tmp_path, monkeypatch)
    yield made
    made.file.close()


def test_event_that_is_written_in_pieces_is_one_line(bench: Bench) -> None:
    bench.room = [3, 4]
    bench.emitter.emit(events.Entered(1))
    bench.emitter.emit(events.Entered(2))
    assert bench.told() == [events.Entered(1), events.Entered(2)]


def test_event_after_a_full_disk_begins_a_line_of_its_own(bench: Bench) -> None:
    bench.room = [3, 0]
    with pytest.raises(OSError, match="No space left"):
        bench.emitter.emit(events.Entered(1))
    bench.emitter.emit(events.Entered(2))
    bench.emitter.emit(events.Entered(3))
    cut_off, *lines = bench.path.read_bytes().splitlines()
    assert len(cut_off) == 3 and [events.decode(line) for line in lines] == [events.Entered(2), events.Entered(3)]


def test_disk_that_is_full_at_once_leaves_no_line_to_end(bench: Bench) -> None:
    bench.room = [0]
    with pytest.raises(OSError, match="No space left"):
        bench.emitter.emit(events.Entered(1))
    bench.emitter.emit(events.Entered(2))
    assert bench.told() == [events.Entered(2)]


def test_forked_child_emits_nothing(bench: Bench) -> None:
    bench.pid = 51
    bench.emitter.emit(events.Entered(1))
    assert bench.told() == []


def test_progress_is_sent_each_tenth_of_a_second_and_at_its_end_once(bench: Bench) -> None:
    bench.emitter.progress(1, 10, "samples")
    bench.now += 0.09
    bench.emitter.progress(2, 10, "samples")
    bench.now += 0.02
    bench.emitter.progress(3, None, "steps")
    for _ in range(2):
        bench.emitter.progress(10, 10, "samples")
    bench.emitter.progress(11, 10, "samples")
    assert bench.progress() == [(1, 10, "samples"), (3, None, "steps"), (10, 10, "samples")]
    bench.now += 0.11
    bench.emitter.progress(10, 10, "samples")
    assert len(bench.progress()) == 4
