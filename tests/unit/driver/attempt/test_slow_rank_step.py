"""A slow rank is recorded with its causes, and moves to another host with the next checkpoint if there is a slot."""

from __future__ import annotations

from ddptrain.config.run_config import FailureConfig
from ddptrain.driver.attempt import actions, inbox
from ddptrain.driver.failure.restart_policy import NoRestart, Restart, RestartPolicy
from ddptrain.driver.failure.slow_ranks import SlowPolicy
from ddptrain.protocol import events
from ddptrain.protocol.worker_notices import SystemSample
from tests.unit.driver.attempt.attempt_play import Play


def training(action: str = "warn") -> Play:
    play = Play(2)
    steps = SlowPolicy(action, 1.5).comparison(2)
    play.state = play.state._replace(steps=steps, replaces=action == "replace")
    return play.start()


def be_slow(play: Play, rank: int = 1, rounds: int = 10) -> None:
    for _ in range(rounds):
        for one in range(2):
            play.event(one, events.StepTimes(play.moment().time_ns, 10, 0.2 if one == rank else 0.1, 0.01))


def test_slow_rank_is_recorded_once_with_the_cause() -> None:
    play = training()
    use = {"cores": 4.0, "cpu_percent": 50.0}
    ranks = {"0": {"cpu_wait_percent": 1.0}, "1": {"cpu_wait_percent": 50.0}, "7": {}}
    play.send(SystemSample(1, 0, 1, "h0", use, ranks))
    be_slow(play)
    ((_, recorded),) = play.all(actions.RecordSlowRank)
    assert recorded.slow.rank == 1
    assert "it waited for a core 50 % of the time" in recorded.causes[0]
    assert not play.all(actions.FindSpareSlots)
    assert len(play.all(actions.RecordSystem)) == 1


def test_nothing_is_compared_without_a_policy() -> None:
    play = Play(2).start()
    be_slow(play)
    assert not play.all(actions.RecordSlowRank)


def test_slow_rank_stays_without_a_free_slot_on_another_host() -> None:
    play = training("replace")
    be_slow(play)
    assert [action.ranks for _, action in play.all(actions.FindSpareSlots)] == [(1,)]
    play.send(inbox.SpareSlots((1,), found=False))
    assert not play.commands()
    assert "none is free" in play.texts()[-1]


def test_ranks_save_and_start_again_for_a_slow_rank() -> None:
    play = training("replace")
    be_slow(play)
    play.send(inbox.SpareSlots((1,), found=True))
    assert [command[1:] for command in play.commands()] == [("move", (0, 1))]
    for rank in range(2):
        play.event(rank, events.Preempted(1, 10))
        play.exit(rank, 1)
    assert play.state.over
    end = play.state.end()
    assert end.moves
    policy = RestartPolicy(FailureConfig())  # allows no restart after a failure
    for _ in range(3):
        again = policy.after(end, 10, scheduler_is_there=True)
        assert isinstance(again, Restart)
        assert again.pause_s == 0.0
    assert policy.after(end, 10, scheduler_is_there=False) == NoRestart()


def test_run_that_finishes_before_its_next_checkpoint_does_not_start_again() -> None:
    play = training("replace")
    be_slow(play)
    play.send(inbox.SpareSlots((1,), found=True))
    play.finish(0)
    play.finish(1)
    assert play.state.end().finished
    assert not play.state.end().moves


def test_failure_of_a_rank_that_is_to_move_counts_as_a_failure() -> None:
    play = training("replace")
    be_slow(play)
    play.send(inbox.SpareSlots((1,), found=True))
    play.fail(0)
    play.exit(0, 1)
    play.wait(40)
    play.obey()
    end = play.state.end()
    assert not end.moves
    assert isinstance(RestartPolicy(FailureConfig()).after(end, 1, scheduler_is_there=True), NoRestart)


def test_impossible_times_of_a_rank_are_ignored() -> None:
    play = training()
    before = play.state.steps
    play.event(0, events.StepTimes(1, 0, float("nan"), -1.0))
    assert play.state.steps == before
