"""Which steps are recorded, and what the user is told; torch.profiler is the real one."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ddptrain.config.rank_settings import StepProfile
from ddptrain.protocol import events
from tests.unit.rank.ranks import Rank


class ProfiledRank(Rank):
    """A rank whose steps have operators with names of their own."""

    def step(self, number: int) -> None:
        """Take a step, and report it."""
        with torch.profiler.record_function(f"work-{number}"):
            torch.ones(4) + number
        self.context.log({"loss": 0.5}, step=number)

    def notes(self) -> list[tuple[str, str]]:
        return [(event.level, event.message) for event in self.events(events.Note)]

    def recorded(self, path: str) -> list[int]:
        """The numbers of the steps whose work is in a trace."""
        trace = json.loads(gzip.decompress(self.saved()[path].read_bytes()))
        names = {event["name"] for event in trace["traceEvents"]}
        return sorted(int(name.removeprefix("work-")) for name in names if name.startswith("work-"))


Make = Callable[..., ProfiledRank]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")  # a profile sets it
    made: list[Rank] = []

    def make_rank(**changes: Any) -> ProfiledRank:
        made.append(rank := ProfiledRank(tmp_path / str(len(made)), **changes))
        return rank

    yield make_rank
    for rank in made:
        rank.file.close()


TRACE = "profile/steps-{}-{}/rank-0.pt.trace.json.gz"


def test_configured_steps_are_recorded_and_no_others(make: Make) -> None:
    rank = make(profile=StepProfile(3, 5))
    for number in range(1, 8):
        rank.step(number)
    rank.context.close()
    assert rank.recorded(TRACE.format(3, 5)) == [3, 4, 5]
    ((level, message),) = rank.notes()
    assert level == "info" and message.startswith("profile: steps 3 to 5 recorded in artifacts/profile/steps-3-5")
    assert sorted(path.name for path in (rank.folder / "staging").iterdir()) == sorted(
        path.name for path in rank.saved().values()
    )


def test_progress_in_steps_counts_and_that_of_samples_does_not(make: Make) -> None:
    rank = make(profile=StepProfile(2, 3))
    for number in range(1, 5):
        rank.context.progress(number * 64, 1000)
        rank.context.progress(number, unit="steps")
    assert TRACE.format(2, 3) in rank.saved()


def test_a_run_that_resumes_inside_the_range_records_the_rest(make: Make) -> None:
    rank = make(profile=StepProfile(10, 13))
    for number in range(11, 16):
        rank.step(number)
    assert rank.recorded(TRACE.format(12, 13)) == [12, 13]


def test_a_run_that_ends_inside_the_range_keeps_what_it_has(make: Make) -> None:
    rank = make(profile=StepProfile(2, 9))
    for number in range(1, 4):
        rank.step(number)
    rank.context.close()
    assert rank.recorded(TRACE.format(2, 3)) == [2, 3]


def test_a_failed_run_discards_the_profile(make: Make) -> None:
    rank = make(profile=StepProfile(2, 9))
    for number in range(1, 4):
        rank.step(number)
    rank.context.close(1.0, failed=True)
    assert rank.saved() == {} and list((rank.folder / "staging").iterdir()) == []
    assert rank.notes() == [("info", "profile: steps 2 to 9 were not recorded: the rank has ended before")]


@pytest.mark.parametrize(
    ("reported", "said"),
    [
        ([], "the last reported step is 0; report each step, with ctx.checkpoint"),
        ([1, 2], "the last reported step is 2"),
        ([9], "after step 0, step 9 was reported"),
        ([1, 9], "after step 1, step 9 was reported; report each step"),
    ],
)
def test_steps_that_do_not_come_are_a_warning(make: Make, reported: list[int], said: str) -> None:
    rank = make(profile=StepProfile(3, 5))
    for number in reported:
        rank.step(number)
    rank.context.close()
    ((level, message),) = rank.notes()
    assert level == "warning" and message.startswith(f"profile: steps 3 to 5 were not recorded: {said}")
    assert rank.saved() == {}


def test_other_ranks_record_nothing_and_a_rank_that_does_not_exist_is_told(make: Make) -> None:
    rank = make(profile=StepProfile(1, 2, (1, 7)))
    for number in range(4):
        rank.step(number)
    assert rank.saved() == {}
    assert rank.notes() == [("warning", "profile: there is no rank 1, 7: the run has ranks 0 to 0")]


def test_trace_that_cannot_be_written_is_a_warning(make: Make) -> None:
    rank = make(profile=StepProfile(1, 2))
    rank.step(0)
    (rank.folder / "staging").rmdir()
    for number in range(1, 4):
        rank.step(number)
    rank.context.close()
    ((level, message),) = rank.notes()
    assert level == "warning" and "steps 1 to 2 of rank 0 were not recorded: " in message
    assert rank.saved() == {}
