"""The events and staged files that a workload's calls produce."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from ddptrain.protocol import events
from ddptrain.rank.output import number, numbers
from tests.unit.rank.ranks import MakeRank, Rank, full_after, make_rank, rank

__all__ = ["make_rank", "rank"]


def test_logged_numbers_and_tensors_arrive_as_numbers(rank: Rank) -> None:
    rank.context.log({"train/loss": torch.tensor(0.5), "n": 3}, step=7, epoch=1.5)
    (event,) = rank.events()
    assert (event.values, event.step, event.epoch) == ({"train/loss": 0.5, "n": 3}, 7, 1.5)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3),
        (0.25, 0.25),
        (torch.tensor([0.5]), 0.5),
        (np.float32(1.5), 1.5),
        (np.array([[7]]), 7),
        (2**63 - 1, 2**63 - 1),  # a larger integer fits into no event
        (-(2**63) - 1, -(2.0**63)),
    ],
)
def test_number_is_read_from_values_with_one_element(value: object, expected: float) -> None:
    assert number("x", value) == expected and type(number("x", value)) is type(expected)
    assert numbers({3: value}) == {"3": expected}


@pytest.mark.parametrize(
    "value", [True, "1", None, [0.5] * 10_000, torch.tensor(True), torch.zeros(2), torch.zeros(0), np.zeros(3)]
)
def test_other_values_are_refused_with_their_name_and_short(rank: Rank, value: object) -> None:
    with pytest.raises(TypeError, match="'train/loss'") as raised:
        rank.context.log({"train/loss": value})  # type: ignore[dict-item]
    assert len(str(raised.value)) < 400


def test_a_number_without_a_name_is_refused(rank: Rank) -> None:
    with pytest.raises(TypeError, match="names with numbers"):
        rank.context.log(0.5)  # type: ignore[arg-type]


def test_progress_is_sent_each_tenth_of_a_second_and_at_its_end_once(rank: Rank) -> None:
    for done in range(1, 10):
        rank.context.progress(done, 10)
    for _ in range(2):
        rank.context.progress(np.int64(10), torch.tensor(10))  # type: ignore[arg-type]
    time.sleep(0.11)
    rank.context.progress(11, unit="steps")
    assert [(event.done, event.total, event.unit) for event in rank.events()] == [
        (1, 10, "samples"),
        (10, 10, "samples"),
        (11, None, "steps"),
    ]
    with pytest.raises(TypeError, match="'done' is '3'"):
        rank.context.progress("3")  # type: ignore[arg-type]


def test_event_after_a_full_disk_begins_a_line_of_its_own(rank: Rank) -> None:
    path = rank.folder / "events"
    with full_after(3):
        with pytest.raises(OSError, match="File too large"):
            rank.emitter.emit(events.Entered(1))
        rank.emitter.note("it ends no rank")
    rank.emitter.emit(events.Entered(2))
    rank.emitter.emit(events.Entered(3))
    cut_off, *lines = path.read_bytes().splitlines()
    assert len(cut_off) == 3 and [events.decode(line) for line in lines] == [events.Entered(2), events.Entered(3)]


def test_forked_child_emits_nothing(rank: Rank) -> None:
    child = os.fork()
    if child == 0:
        rank.emitter.emit(events.Entered(1))
        os._exit(0)
    os.waitpid(child, 0)
    assert rank.events() == []


@pytest.mark.parametrize("data", [b"hello", "hello", Path("source.txt")])
def test_saved_data_is_staged_as_it_is_with_its_hash(rank: Rank, data: bytes | str | Path) -> None:
    source = rank.folder / "source.txt"
    source.write_text("hello")
    rank.context.save_file("samples/a.txt", source if isinstance(data, Path) else data)
    source.write_text("after")
    (event,) = rank.events()
    assert (event.path, event.size_bytes, event.sha256) == ("samples/a.txt", 5, hashlib.sha256(b"hello").hexdigest())
    assert (rank.folder / "staging" / event.staging).read_bytes() == b"hello"


@pytest.mark.parametrize("path", ["", ".", "/a", "..", "../a", "a/../b", "a/.."])
def test_path_that_leaves_the_run_directory_is_refused_in_the_rank(rank: Rank, path: str) -> None:
    with pytest.raises(ValueError, match="save_file"):
        rank.context.save_file(path, b"")
    assert rank.events() == []


def test_epochs_are_counted_from_1_and_set_in_each_loader(rank: Rank) -> None:
    assert list(rank.context.epochs(3)) == [1, 2, 3] and list(rank.context.epochs(0)) == []
    loaders = [rank.context.loader(range(4), batch_size=2) for _ in range(2)]  # type: ignore[arg-type]
    seen = [[loader.epoch for loader in loaders] for _ in rank.context.epochs(2)]
    assert seen == [[1, 1], [2, 2]]


def test_rank_0_reports_how_long_a_block_took_unless_it_was_short(make_rank: MakeRank) -> None:
    ranks = [make_rank(rank=number, world_size=2) for number in range(2)]
    for each in ranks:
        with each.context.timed("evaluation"):
            time.sleep(0.02)
        with each.context.timed("nothing"):
            pass
    (event,) = (events.decode(line) for line in (ranks[0].folder / "events").read_bytes().splitlines())
    assert isinstance(event, events.Timed) and event.activity == "evaluation" and event.seconds >= 0.02
    assert (ranks[1].folder / "events").read_bytes() == b""
