"""What a rank emits and saves."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ddptrain.protocol import events
from ddptrain.rank import output as rank_emitter
from ddptrain.rank.output import ArtifactFiles, Emitter, number, numbers, optional, optional_whole, stays_below, whole
from tests.unit.specs import make_spec

# --- Events are whole lines, also after a full disk, and progress is sent at most ten times per second ---


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


# --- Users' numbers are converted to Python numbers, and everything else is refused with its name ---


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3, 3), (0.25, 0.25), (torch.tensor([0.5]), 0.5), (np.float32(1.5), 1.5), (np.array([[7]]), 7)],
)
def test_number_is_read_from_values_with_one_element(value: object, expected: float) -> None:
    assert number("x", value) == expected
    assert type(number("x", value)) is type(expected)


@pytest.mark.parametrize(
    "value", [True, "1", None, [1.0], torch.tensor(True), torch.zeros(2), torch.zeros(0), np.zeros(3)]
)
def test_other_values_are_refused_with_their_name(value: object) -> None:
    with pytest.raises(TypeError, match="'loss'"):
        number("loss", value)


def test_long_value_is_shortened_in_the_message() -> None:
    with pytest.raises(TypeError) as raised:
        number("loss", [0.5] * 10_000)
    assert len(str(raised.value)) < 400 and str(raised.value).endswith("... (list)")


def test_integer_that_no_event_can_hold_becomes_a_float() -> None:
    found = numbers({"fits": 2**63 - 1, "least": -(2**63), "large": 10**30, "negative": -(2**63) - 1, "huge": 10**400})
    assert found == {"fits": 2**63 - 1, "least": -(2**63), "large": 1e30, "negative": -(2.0**63), "huge": float("inf")}
    assert [type(value) for value in found.values()] == [int, int, float, float, float]
    assert number("x", -(10**400)) == float("-inf")


def test_mapping_is_converted_with_text_names() -> None:
    assert numbers({"a": torch.tensor(2.0), 3: 4}) == {"a": 2.0, "3": 4}  # type: ignore[dict-item]


def test_step_must_be_whole_and_may_be_missing() -> None:
    assert (whole("step", 7.0), whole("step", torch.tensor(8))) == (7, 8)
    assert (optional_whole("step", 7.0), optional_whole("step", None)) == (7, None)
    with pytest.raises(TypeError, match="'step' is None"):
        whole("step", None)
    with pytest.raises(TypeError, match=r"step must be a whole number, not 7\.5"):
        whole("step", 7.5)
    for value in (float("nan"), float("inf"), 10**30, 2**63):
        with pytest.raises(TypeError, match="step must be a whole number"):
            whole("step", value)
    assert (optional("epoch", 1.5), optional("epoch", None)) == (1.5, None)


# --- Files are staged under new names and announced with size and hash ---


@pytest.mark.parametrize("path", ["a.txt", "a/b.txt", "a/..b"])
def test_path_below_the_folder_is_accepted(path: str) -> None:
    assert stays_below(path)


@pytest.mark.parametrize("path", ["", ".", "/a", "..", "../a", "a/../b", "a/.."])
def test_path_that_may_leave_the_folder_is_refused(path: str) -> None:
    assert not stays_below(path)


def test_file_is_lent_before_it_is_announced(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    files = ArtifactFiles(make_spec(staging=str(tmp_path)), Emitter(fd))
    lent: list[tuple[bytes, bytes]] = []
    files.save("a/b.txt", b"12345", lambda path: lent.append((path.read_bytes(), (tmp_path / "events").read_bytes())))
    files.save("c.txt", "6")
    os.close(fd)
    first, second = (events.decode(line) for line in (tmp_path / "events").read_bytes().splitlines())
    assert lent == [(b"12345", b"")]
    assert isinstance(first, events.FileSaved) and isinstance(second, events.FileSaved)
    assert (first.path, first.staging, first.size_bytes, first.area) == ("a/b.txt", "file-0", 5, "artifacts")
    assert first.sha256 == hashlib.sha256(b"12345").hexdigest()
    assert (second.path, second.staging, (tmp_path / "file-1").read_text()) == ("c.txt", "file-1", "6")
