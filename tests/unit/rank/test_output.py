"""What a rank emits and saves."""

from __future__ import annotations

import hashlib
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from ddptrain.protocol import events
from ddptrain.rank.output import ArtifactFiles, Emitter, number, numbers, optional, optional_whole, stays_below, whole
from tests.unit.specs import make_spec

# --- Events are whole lines, also after a full disk, and progress is sent at most ten times per second ---


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events"


@pytest.fixture
def emitter(path: Path) -> Iterator[Emitter]:
    with path.open("ab", buffering=0) as file:
        yield Emitter(file.fileno())


@contextmanager
def full_after(size: int) -> Iterator[None]:
    """Let files grow to `size` bytes only, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_event_after_a_full_disk_begins_a_line_of_its_own(emitter: Emitter, path: Path) -> None:
    with full_after(3):
        with pytest.raises(OSError, match="File too large"):
            emitter.emit(events.Entered(1))
        emitter.note("it ends no rank")
    emitter.emit(events.Entered(2))
    emitter.emit(events.Entered(3))
    cut_off, *lines = path.read_bytes().splitlines()
    assert len(cut_off) == 3 and [events.decode(line) for line in lines] == [events.Entered(2), events.Entered(3)]


def test_forked_child_emits_nothing(emitter: Emitter, path: Path) -> None:
    child = os.fork()
    if child == 0:
        emitter.emit(events.Entered(1))
        os._exit(0)
    os.waitpid(child, 0)
    assert path.read_bytes() == b""


def test_progress_is_sent_each_tenth_of_a_second_and_at_its_end_once(emitter: Emitter, path: Path) -> None:
    for done in range(1, 10):
        emitter.progress(done, 10, "samples")
    for _ in range(2):
        emitter.progress(10, 10, "samples")
    time.sleep(0.11)
    emitter.progress(11, None, "steps")
    sent = [events.decode(line) for line in path.read_bytes().splitlines()]
    assert [(event.done, event.unit) for event in sent if isinstance(event, events.Progress)] == [
        (1, "samples"),
        (10, "samples"),
        (11, "steps"),
    ]


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


def test_file_is_staged_under_a_new_name_and_announced_with_size_and_hash(
    emitter: Emitter, path: Path, tmp_path: Path
) -> None:
    files = ArtifactFiles(make_spec(staging=str(tmp_path)), emitter)
    staged = files.stage("a/b.txt", b"12345")
    assert (staged.read_bytes(), path.read_bytes()) == (b"12345", b"")
    files.announce("a/b.txt", staged)
    files.save("c.txt", "6")
    first, second = (events.decode(line) for line in path.read_bytes().splitlines())
    assert isinstance(first, events.FileSaved) and isinstance(second, events.FileSaved)
    assert (first.path, first.staging, first.size_bytes, first.area) == ("a/b.txt", "file-0", 5, "artifacts")
    assert first.sha256 == hashlib.sha256(b"12345").hexdigest()
    assert (second.path, second.staging, (tmp_path / "file-1").read_text()) == ("c.txt", "file-1", "6")
