"""Properties of attempts and of the state of ranks."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ddptrain.driver import inbox
from ddptrain.driver.attempt import Phase
from ddptrain.errors import ClusterError
from ddptrain.protocol import events
from ddptrain.protocol.news import News, RankExit, RankNews
from ddptrain.results.errors import UnsafePath
from tests.unit.driver.attempt.attempt_play import GRACE_S, Play

# --- What holds for the attempt whatever arrives, and in whatever order ---


WORLD = 3
RANKS = st.integers(0, WORLD - 1)
ATTEMPTS = st.sampled_from([1, 1, 1, 2])
SIZES = st.integers(0, 99)
STATUSES = st.sampled_from([0, 1, 75, -9, -15, -6])
TIMES = st.integers(99_000_000_000, 101_000_000_000)
EVENTS = st.one_of(
    st.builds(events.Started, TIMES, st.just(5), st.just("h")),
    st.builds(events.Entered, TIMES),
    st.builds(events.Metrics, TIMES, st.just({"loss": 1.0}), st.integers(0, 9)),
    st.builds(events.Progress, TIMES, st.just(1.0)),
    st.builds(
        events.Failure,
        TIMES,
        st.just("E"),
        st.just("m"),
        st.just("t"),
        exit_code=st.sampled_from([None, 75]),
        lost_peer=st.booleans(),
        timed_out=st.booleans(),
    ),
    st.builds(events.CheckpointSaved, TIMES, st.just(5), st.just("s"), st.just(())),
    st.builds(events.FileSaved, TIMES, st.just("stacks/rank-0.txt"), st.just("s"), st.just(1), st.just("")),
    st.builds(events.Stacks, TIMES, st.just(("/u/train.py:1 load",)), st.integers(0, 2)),
    st.builds(events.Noticed, TIMES),
    st.builds(events.Preempted, TIMES, st.just(5)),
    st.builds(events.Finished, TIMES),
    st.builds(events.TrackerFailed, TIMES, st.just("wandb"), st.just("off")),
    st.builds(events.ThreadFailure, TIMES, st.just("t"), st.just("E"), st.just("m"), st.just("tb")),
    st.builds(events.Finishing, TIMES, st.just(5.0)),
)
RANK_NEWS = st.builds(
    RankNews,
    RANKS,
    SIZES,
    SIZES,
    cpu_s=st.none() | st.floats(0, 99),
    gpu_percent=st.none() | st.floats(0, 100),
    ended=st.none() | st.builds(RankExit, st.just(5), STATUSES, TIMES),
    broken=st.sampled_from(["", "", "", "no rank server"]),
)
MESSAGES = st.one_of(
    st.builds(
        News,
        ATTEMPTS,
        st.lists(RANK_NEWS, max_size=2).map(tuple),
        st.integers(0, 9),
        st.booleans(),
        worker=st.sampled_from(["tcp://h0", "tcp://h1", "tcp://h2"]),
    ),
    st.builds(inbox.TaskFailed, ATTEMPTS, RANKS, st.just("no")),
    st.builds(inbox.WorkerLost, st.sampled_from(["tcp://h0", "tcp://h1", "tcp://elsewhere"])),
    st.builds(inbox.SignalReceived, st.sampled_from([signal.SIGTERM, signal.SIGINT]), st.sampled_from(inbox.Request)),
    st.builds(inbox.ArtifactFailed, RANKS, st.just("x"), st.sampled_from([OSError("no"), UnsafePath("no")])),
    st.builds(inbox.ArtifactStored, RANKS, st.just("x"), st.just("p")),
    st.builds(inbox.ArtifactRetried, RANKS, st.just("x"), st.just(OSError("no")), st.just(2)),
    st.builds(inbox.ResultsLost, st.just(ClusterError("gone"))),
)
TICK = st.fixed_dictionaries(
    {"connected": st.booleans(), "worker_fault": st.sampled_from([None, None, "it ended"]), "is_read": st.booleans()}
)
OUTPUT = st.tuples(RANKS, st.lists(EVENTS, max_size=2), st.sampled_from(["", "", "", "cut"]))
STEPS = st.lists(st.tuples(st.sampled_from([0.0, 0.01, 0.2, 3.0, 70.0]), MESSAGES | TICK | OUTPUT), max_size=40)


Steps = list[tuple[float, Any]]


def played(steps: Steps, look: Callable[[Play], object] = lambda play: None) -> Play:
    play = Play(WORLD, hang_timeout_s=10.0)
    for seconds, happens in steps:
        match happens:
            case dict():
                read_until = play.now + seconds if happens["is_read"] else 0.0
                fault = happens["worker_fault"]
                play.tick(seconds, connected=happens["connected"], worker_fault=fault, read_until=read_until)
            case (rank, found, error):
                play.now += seconds
                play.output(rank, *found, error=error)
            case message:
                play.now += seconds
                play.send(message)
        look(play)
    return play


@given(STEPS)
@settings(max_examples=100, deadline=None)
def test_every_order_of_messages_ends_once_the_driver_is_interrupted(
    steps: Steps,
) -> None:
    play = played(steps)
    play.send(inbox.SignalReceived(signal.SIGINT))
    play.wait(GRACE_S + 4.0, alive=False, every_s=1.0)
    assert play.attempt.over
    assert play.attempt.running == 0 == sum(not rank.over for rank in play.attempt.ranks)
    play.attempt.end()


@given(STEPS)
@settings(max_examples=100, deadline=None)
def test_every_fault_ends_the_attempt(steps: Steps) -> None:
    play = played(steps)
    if play.attempt.faults or play.attempt.stopping or play.attempt.outcome.notice:
        play.wait(2 * GRACE_S + 10.0, alive=True, every_s=1.0)
        assert play.attempt.over


@given(STEPS)
@settings(max_examples=100, deadline=None)
def test_attempt_never_goes_back_to_an_earlier_phase(steps: Steps) -> None:
    phases: list[Phase] = []
    played(steps, lambda play: phases.append(play.attempt.phase))
    assert phases == sorted(phases)


@given(STEPS)
@settings(max_examples=100, deadline=None)
def test_no_rank_keeps_running(steps: Steps) -> None:
    play = played(steps)
    play.send(inbox.SignalReceived(signal.SIGINT))
    play.wait(GRACE_S + 4.0, alive=False, every_s=1.0)
    stopped = {rank for _, ranks, _ in play.stops() for rank in ranks}
    lost = set(play.all("rest"))
    unread = {happens[0] for _, happens in steps if isinstance(happens, tuple)}
    for number, rank in enumerate(play.attempt.ranks):
        assert rank.ended is not None or not rank.submitted_at or number in stopped | lost | unread
    started: set[int] = set()
    ended: set[int] = set()
    for _, call in play.done:
        if call[0] == "ended":
            ended.add(call[1])
        elif call[0] == "submit":
            assert not started & set(call[1]) and not ended & set(call[1])  # nothing is started once it was over
            started |= set(call[1])


@given(STEPS)
@settings(max_examples=100, deadline=None)
def test_end_of_a_rank_is_recorded_once_and_its_own_exit_is_never_taken_back(
    steps: Steps,
) -> None:
    play = played(steps)
    play.send(inbox.SignalReceived(signal.SIGINT))
    play.wait(GRACE_S + 4.0, alive=False, every_s=1.0)
    ended = [rank for rank, _, _ in play.all("ended")]
    assert len(ended) == len(set(ended))


FAULTS = st.lists(
    st.tuples(RANKS, TIMES, st.sampled_from(["cause", "cause", "peer", "killed"])),
    min_size=1,
    max_size=WORLD,
    unique_by=lambda fault: fault[0],
)


@given(FAULTS, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_root_cause_does_not_depend_on_the_order_within_the_settling_time(
    faults: list[tuple[int, int, str]], order: random.Random
) -> None:
    causes = []
    for _ in range(3):
        order.shuffle(faults)
        play = Play(WORLD).start()
        for rank, time_ns, what in faults:
            play.now += 0.04
            if what == "killed":
                play.exit(rank, -9, at_s=time_ns / 1e9)
            else:
                play.event(rank, events.Failure(time_ns, "E", f"rank {rank}", "", lost_peer=what == "peer"))
        play.wait(1.6)
        play.obey()
        cause = play.cause
        causes.append((cause.rank, cause.kind, cause.line))
    real = [(time_ns, rank) for rank, time_ns, what in faults if what != "peer"]
    expected = min(real) if real else min((time_ns, rank) for rank, time_ns, _ in faults)
    assert {cause[0] for cause in causes} == {expected[1]}
    assert len(set(causes)) == 1


# --- The record of a rank in run.json ---
