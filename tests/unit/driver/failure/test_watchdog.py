"""A worker group may hang when a rank shows no activity; what counts as activity depends on its reports so far."""

from __future__ import annotations

from typing import Any

import pytest

from ddptrain.driver.watchdog import Hang, new_watchdog
from ddptrain.protocol import events
from tests.unit.driver.attempt.ranks import running


class Scene:
    """Two ranks and a watchdog of 10 s (60 s for the start), in a time of their own."""

    def __init__(self, timeout_s: float | str | None = 10.0) -> None:
        self.now = 100.0
        self.dog = new_watchdog(timeout_s, 60.0)
        self.ranks = [running(rank) for rank in (0, 1)]

    def change(self, rank: int, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self.ranks[rank], name, value)

    def enter(self) -> None:
        for rank in (0, 1):
            self.change(rank, entered=True)
            self.heard(rank, events.Entered(1))

    def heard(self, rank: int, event: events.Event, count: int = 1) -> None:
        self.dog.on_event(self.ranks[rank].activity, event, self.now, count)

    def grew(self, rank: int) -> None:
        activity = self.ranks[rank].activity
        assert activity.grew(activity.log_size + 1, self.now)

    def cpu(self, rank: int, seconds: float) -> None:
        self.dog.on_cpu(self.ranks[rank].activity, seconds, self.now)

    def gpu(self, rank: int, percent: float) -> None:
        self.ranks[rank].activity.used_gpu(percent, self.now)

    def notice(self, rank: int) -> None:
        self.ranks[rank].activity.noticed(self.now)

    def suspended(self, seconds: float) -> None:
        for rank in self.ranks:
            rank.activity.skip(seconds, self.now)

    def works(self, rank: int) -> bool:
        return self.dog.works(self.ranks[rank], self.now)

    def uses(self, rank: int) -> str:
        return self.dog.uses(self.ranks[rank].activity, self.now)

    def silence(self) -> str:
        return self.dog.silence(self.ranks, self.now)

    def hang(self) -> Hang | None:
        return self.dog.overdue(self.ranks, self.now)

    def report(self, *ranks: int) -> None:
        for rank in ranks:
            self.heard(rank, events.Progress(1, 1.0))

    def late(self) -> tuple[int, ...]:
        hang = self.hang()
        return hang.ranks if hang is not None else ()


def test_silent_ranks_are_named_with_the_longest_silent_first() -> None:
    scene = Scene()
    scene.enter()
    scene.now += 1.0
    scene.report(1)
    scene.now += 1.0
    scene.report(0)
    scene.now += 10.5
    hang = scene.hang()
    assert hang is not None
    assert (hang.ranks, hang.limit_s, hang.silent_s) == ((1, 0), 10.0, 11.5)


def test_rank_that_waits_for_its_trackers_is_excused_for_as_long_as_it_has_said() -> None:
    scene = Scene()
    scene.enter()
    scene.report(0, 1)
    scene.heard(0, events.Finishing(1, timeout_s=30.5))
    scene.heard(0, events.Note(1, "trackers still have up to 27 s to finish"))
    for _ in range(3):
        scene.now += 9.0
        scene.report(1)
        assert scene.late() == ()
    scene.now += 15.0
    scene.report(1)
    assert scene.late() == (0,)


def test_one_rank_that_has_reported_and_stops_is_a_hang_though_others_go_on() -> None:
    scene = Scene()
    scene.enter()
    scene.report(0, 1)
    scene.now += 10.5
    scene.report(0)
    assert scene.late() == (1,)


def test_rank_that_never_reports_may_wait_for_one_that_does() -> None:
    scene = Scene()
    scene.enter()
    for _ in range(5):
        scene.now += 9.0
        scene.report(0)
        assert scene.late() == ()
    scene.now += 10.5
    assert scene.late() == (1, 0)


# A rank uses the CPU for `busy_s`, without a word until `at_s`: is it late, does it work? It may report once before.
BUSY = [
    (True, 0.0, 9.0, False, True),  # not silent for long
    (True, 0.0, 10.5, True, False),  # it sleeps
    (True, 50.0, 9.0, False, True),
    (True, 50.0, 10.5, True, True),  # silent: its stacks are asked for; busy: they decide
    (True, 50.0, 59.5, True, True),
    (True, 50.0, 61.0, True, False),  # it has stopped working
    (True, 70.0, 59.0, True, True),
    (True, 70.0, 61.0, True, False),  # it works, but six times the limit are over
    (False, 700.0, 690.0, False, True),  # a script that only prints its result
    (False, 0.0, 11.0, True, False),
]


@pytest.mark.parametrize("uses", ["cpu", "gpu"])
@pytest.mark.parametrize(("reports", "busy_s", "at_s", "late", "works"), BUSY)
def test_cpu_and_gpu_use_count_up_to_the_limit_also_after_a_rank_has_reported(
    uses: str, reports: bool, busy_s: float, at_s: float, late: bool, works: bool
) -> None:
    scene = Scene()
    scene.enter()
    began = scene.now
    if reports:
        scene.report(0, 1)
    while scene.now < began + at_s:
        scene.now += 0.5
        if scene.now - began <= busy_s:
            for rank in (0, 1):
                scene.cpu(rank, scene.now - began) if uses == "cpu" else scene.gpu(rank, 90.0)
    assert bool(scene.late()) == late
    assert scene.works(0) == works


def test_cpu_use_that_is_known_just_after_the_last_report_is_no_work_since_then() -> None:
    scene = Scene()
    scene.enter()
    scene.report(0, 1)
    scene.now += 2.0
    scene.cpu(0, 5.0)
    scene.now += 1.0
    scene.cpu(1, 5.0)
    scene.now += 7.5
    assert [scene.works(rank) for rank in (0, 1)] == [False, True]


def test_time_in_which_a_worker_was_cut_off_does_not_count() -> None:
    scene = Scene()
    scene.enter()
    scene.report(0, 1)
    for rank in (0, 1):
        scene.notice(rank)
    for _ in range(30):
        scene.now += 1.0
        scene.notice(0)
        scene.heard(0, events.Progress(1, 1.0))
        assert scene.late() == ()  # nobody knows what rank 1 does
    scene.notice(1)
    assert scene.late() == ()
    scene.now += 4.0
    scene.notice(0)
    scene.notice(1)
    scene.now += 4.0
    assert scene.late() == ()
    scene.notice(0)
    scene.notice(1)
    scene.report(0)
    scene.now += 3.0
    assert scene.late() == (1,)


def test_silence_is_shown_after_a_third_of_the_limit() -> None:
    scene = Scene()
    scene.enter()
    scene.now += 9.0
    assert scene.silence() == "", "no rank has reported so far"
    scene.report(0, 1)
    scene.now += 3.3
    assert scene.silence() == ""
    scene.report(0)
    scene.now += 0.2
    assert scene.silence() == "no report for 4 s (limit 10 s)", "that of rank 1"
    scene.change(1, finished=True)
    assert scene.silence() == ""


def test_children_that_end_take_their_time_along_and_are_no_sign() -> None:
    scene = Scene()
    scene.enter()
    scene.cpu(0, 50.0)
    scene.now += 5.0
    scene.cpu(0, 1.0)
    scene.now += 3.0
    scene.cpu(0, 2.0)
    scene.now += 9.0
    assert scene.late() == (1,)


def test_start_has_the_longer_one_of_its_times() -> None:
    scene = Scene()
    scene.heard(0, events.Started(1, 1, "h"))
    scene.now += 59.0
    assert scene.late() == ()
    scene.now += 2.0
    assert scene.late() == (0, 1)


def test_rank_that_does_not_end_after_its_work_is_a_hang() -> None:
    scene = Scene()
    scene.enter()
    scene.heard(1, events.Finished(1))
    scene.change(0, lost=True)
    scene.change(1, finished=True)
    scene.now += 11.0
    assert scene.late() == (1,)


def test_stacks_that_we_have_asked_for_are_no_sign_of_life() -> None:
    scene = Scene()
    scene.enter()
    scene.report(0, 1)
    scene.now += 11.0
    scene.heard(0, events.Stacks(1, ()))
    scene.heard(0, events.FileSaved(1, "stacks/rank-0.txt", "s", 1, ""))
    assert scene.late() == (0, 1)


def test_watchdog_can_be_turned_off() -> None:
    scene = Scene(None)
    scene.enter()
    scene.report(0, 1)
    scene.cpu(0, 1.0)
    scene.now += 1e6
    assert scene.late() == ()


# hang_timeout_s: auto


def steps(scene: Scene, count: int, every_s: float, *ranks: int) -> None:
    for _ in range(count):
        scene.now += every_s
        scene.report(*(ranks or (0, 1)))


def entered(timeout_s: float | str | None = "auto") -> Scene:
    scene = Scene(timeout_s)
    scene.enter()
    return scene


def limit_s(scene: Scene) -> float:
    """After how many seconds of silence the worker group may hang."""
    since = scene.now
    while scene.hang() is None:
        scene.now += 1.0
        assert scene.now < since + 1000.0
    return scene.now - since - 1.0


@pytest.mark.parametrize(
    ("every_s", "count", "expected"),
    [
        (0.2, 20, 40.0),  # ten times 0.2 s would be less than a slow disk takes
        (8.0, 20, 80.0),
        (100.0, 20, 600.0),
        (0.2, 19, 120.0),
        (30.0, 19, 120.0),
    ],
)
def test_limit_follows_the_runs_own_pauses_from_the_twentieth_report_on(
    every_s: float, count: int, expected: float
) -> None:
    scene = entered()
    steps(scene, count, every_s)
    assert limit_s(scene) == pytest.approx(expected, abs=1.0)


def test_the_longest_pause_counts_and_what_came_before_the_first_report_does_not() -> None:
    scene = entered()
    scene.now += 50.0  # compilation
    steps(scene, 200, 0.2)
    scene.now += 12.0  # a validation
    steps(scene, 200, 0.2)
    assert limit_s(scene) == pytest.approx(122.0, abs=1.0)


def test_time_in_which_the_driver_was_suspended_is_no_pause() -> None:
    scene = entered()
    steps(scene, 200, 0.2)
    scene.now += 3600.0
    scene.suspended(3600.0)
    steps(scene, 20, 0.2)
    assert limit_s(scene) == pytest.approx(40.0, abs=1.0)


def test_the_slowest_reporter_decides_for_the_group() -> None:
    scene = entered()
    for _ in range(30):
        steps(scene, 20, 0.3, 0)
        scene.report(1)
    assert limit_s(scene) == pytest.approx(60.0, abs=1.0)
    rare = entered()
    steps(rare, 1, 1.0)
    steps(rare, 300, 0.2, 0)
    assert limit_s(rare) == pytest.approx(60.0, abs=1.0)  # rank 1 has reported once, 60 s ago: 120 s
