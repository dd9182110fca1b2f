"""A gang hangs when a rank gives no sign of life, and what counts as one depends on what the rank has shown before."""

from __future__ import annotations

from dataclasses import dataclass

from ddptrain import events
from ddptrain.driver.watchdog import Stage, Watchdog
from ddptrain.spec import RankSpec
from tests.unit.specs import make_spec


@dataclass
class Rank:
    """A rank that runs."""

    spec: RankSpec
    entered: bool = False
    finished: bool = False
    submitted_at: float = 100.0
    over: bool = False


class Scene:
    """Two ranks and a watchdog of 10 s (60 s for the start), in a time of their own."""

    def __init__(self, timeout_s: float | None = 10.0) -> None:
        self.now = 100.0
        self.dog = Watchdog(timeout_s, 60.0, lambda: self.now)
        self.ranks = [Rank(make_spec(rank=rank)) for rank in (0, 1)]

    def enter(self) -> None:
        for rank in self.ranks:
            rank.entered = True
            self.dog.heard(rank.spec.rank, events.Entered(1))

    def report(self, *ranks: int) -> None:
        for rank in ranks:
            self.dog.heard(rank, events.Progress(1, 1.0))

    def late(self) -> tuple[int, ...]:
        hang = self.dog.overdue(self.now, self.ranks)
        return hang.ranks if hang is not None else ()


def test_ranks_that_report_go_on() -> None:
    scene = Scene()
    scene.enter()
    for _ in range(5):
        scene.now += 9.0
        scene.report(0, 1)
        assert scene.late() == ()


def test_silent_ranks_are_named_with_the_longest_silent_first() -> None:
    scene = Scene()
    scene.enter()
    scene.now += 1.0
    scene.report(1)
    scene.now += 1.0
    scene.report(0)
    scene.now += 10.5
    hang = scene.dog.overdue(scene.now, scene.ranks)
    assert hang is not None
    assert (hang.stage, hang.ranks, hang.limit_s, hang.idle_s) == (Stage.TRAIN, (1, 0), 10.0, 11.5)


def test_rank_that_waits_for_its_trackers_is_excused_for_as_long_as_it_has_said() -> None:
    scene = Scene()
    scene.enter()
    scene.report(0, 1)
    scene.dog.heard(0, events.Finishing(1, timeout_s=30.5))
    scene.dog.heard(0, events.Note(1, "trackers still have up to 27 s to finish"))
    for _ in range(3):
        scene.now += 9.0
        scene.report(1)
        assert scene.late() == ()
    scene.now += 15.0
    scene.report(1)
    assert scene.late() == (0,)


def test_what_a_tracker_tells_is_no_sign_of_life() -> None:
    scene = Scene()
    scene.enter()
    scene.report(0, 1)
    scene.now += 10.5
    scene.report(1)
    scene.dog.heard(0, events.Tracked(1, "wandb", {"url": "u"}))
    scene.dog.heard(0, events.TrackerFailed(1, "wandb", "is off"))
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


def test_printing_is_a_sign_of_life() -> None:
    scene = Scene()
    scene.enter()
    scene.report(0, 1)
    scene.now += 9.0
    scene.dog.grew(0)
    scene.dog.grew(1)
    scene.now += 9.0
    assert scene.late() == ()


def test_silent_script_goes_on_as_long_as_it_uses_the_processor() -> None:
    scene = Scene()
    scene.enter()
    for tenths in range(5):
        scene.now += 9.0
        scene.dog.cpu(0, 0.1 * (tenths + 1))
        scene.dog.cpu(1, 0.1 * (tenths + 1))
        assert scene.late() == ()
    scene.now += 9.0
    scene.dog.cpu(0, 0.55)
    scene.dog.cpu(1, 0.55)  # less than a hundredth of the time: it only waits
    scene.now += 2.0
    assert scene.late() == (0, 1)


def test_processor_is_no_sign_of_life_of_a_rank_that_reports_often() -> None:
    scene = Scene()
    scene.enter()
    scene.report(0, 1)
    scene.now += 10.5
    scene.dog.cpu(0, 10.0)
    assert scene.late() == (0, 1)


def test_rank_that_reports_once_an_hour_is_judged_by_its_use_of_the_processor() -> None:
    scene = Scene()
    scene.enter()
    for second in range(12):
        scene.now += 1.0
        scene.dog.cpu(0, float(second))
        scene.dog.cpu(1, float(second))
    scene.report(0, 1)
    scene.now += 9.0
    scene.dog.cpu(0, 20.0)
    scene.dog.cpu(1, 20.0)
    scene.now += 9.0
    assert scene.late() == ()


def test_children_that_end_take_their_time_along_and_are_no_sign() -> None:
    scene = Scene()
    scene.enter()
    scene.dog.cpu(0, 50.0)
    scene.now += 5.0
    scene.dog.cpu(0, 1.0)
    scene.now += 3.0
    scene.dog.cpu(0, 2.0)
    scene.now += 9.0
    assert scene.late() == (1,)


def test_start_has_the_longer_one_of_its_times() -> None:
    scene = Scene()
    scene.dog.heard(0, events.Started(1, 1, "h"))
    scene.now += 59.0
    assert scene.late() == ()
    scene.now += 2.0
    hang = scene.dog.overdue(scene.now, scene.ranks)
    assert hang is not None
    assert (hang.stage, hang.limit_s) == (Stage.START, 60.0)


def test_rank_that_was_never_ordered_is_waited_for_by_others() -> None:
    scene = Scene()
    scene.ranks[1].submitted_at = 0.0
    scene.now += 61.0
    assert scene.late() == (0,)


def test_ranks_that_have_ended_are_not_asked() -> None:
    scene = Scene()
    scene.enter()
    scene.report(0, 1)
    scene.now += 20.0
    scene.ranks[0].over = scene.ranks[1].over = True
    assert scene.late() == ()


def test_rank_that_does_not_end_after_its_work_is_a_hang() -> None:
    scene = Scene()
    scene.enter()
    scene.dog.heard(1, events.Finished(1))
    scene.ranks[0].over = scene.ranks[1].finished = True
    scene.now += 11.0
    hang = scene.dog.overdue(scene.now, scene.ranks)
    assert hang is not None
    assert (hang.stage, hang.ranks) == (Stage.END, (1,))


def test_time_in_which_the_driver_slept_does_not_count() -> None:
    scene = Scene()
    scene.enter()
    scene.report(0, 1)
    scene.now += 3600.0
    scene.dog.suspended(3600.0)
    assert scene.late() == ()
    scene.now += 11.0
    assert scene.late() == (0, 1)


def test_stacks_that_we_have_asked_for_are_no_sign_of_life() -> None:
    scene = Scene()
    scene.enter()
    scene.report(0, 1)
    scene.now += 11.0
    scene.dog.heard(0, events.Stacks(1, ()))
    scene.dog.heard(0, events.FileSaved(1, "stacks/rank-0.txt", "s", 1, ""))
    assert scene.late() == (0, 1)


def test_watchdog_can_be_turned_off() -> None:
    scene = Scene(None)
    scene.enter()
    scene.report(0, 1)
    scene.dog.cpu(0, 1.0)
    scene.now += 1e6
    assert scene.late() == ()
