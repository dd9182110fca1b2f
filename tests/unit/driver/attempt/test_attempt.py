"""What the attempt decides in every case of docs/design.md's "Failure", in a time of its own and without processes."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable

import pytest

from ddptrain.driver import inbox
from ddptrain.driver.fault import FaultKind
from ddptrain.errors import ClusterError, ExitCode
from ddptrain.protocol import events
from ddptrain.protocol.news import News, RankExit, RankNews
from ddptrain.results.errors import ResultsError, UnsafePath
from tests.unit.driver.attempt.attempt_play import GRACE_S, PORT, Play

BUSY = ("/home/u/train.py:41 load",)
REDUCING = ("/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:3100 all_reduce", *BUSY)


def raises_and_takes_a_victim(play: Play) -> None:
    play.fail(1, at_s=play.now)
    play.fail(0, at_s=play.now + 0.01, lost_peer=True)


def victim_is_heard_first(play: Play) -> None:
    play.fail(2, at_s=play.now - 1.0, lost_peer=True)  # its host's clock is slow
    play.now += 1.0
    play.fail(1, at_s=play.now)


def two_fail_and_the_second_is_heard_first(play: Play) -> None:
    play.fail(2, at_s=play.now + 0.05)
    play.now += 0.1
    play.fail(0, at_s=play.now - 0.06)


def fails_in_a_long_clean_up(play: Play) -> None:
    play.fail(0, at_s=play.now, lost_peer=True)
    play.tick(1.6)  # the group is being stopped
    play.fail(1, at_s=play.now, handled=True)


def only_victims(play: Play) -> None:
    play.fail(2, at_s=play.now + 0.1, lost_peer=True)
    play.fail(1, at_s=play.now, lost_peer=True)


def rank_returns_early(play: Play) -> None:
    play.finish(1)
    play.fail(0, lost_peer=True)
    play.fail(2, lost_peer=True)


def worker_is_lost_with_a_failure_in_its_files(play: Play) -> None:
    play.unread[1] = [events.Failure(5, "OSError", "no disk", "Traceback")]
    play.send(inbox.WorkerLost("tcp://h1"))


def worker_is_lost(play: Play) -> None:
    play.send(inbox.WorkerLost("tcp://h1"))


def network_is_cut(play: Play) -> None:
    for _ in range(70):
        play.alive(0)
        play.alive(2)
        play.tick(1.0)


def all_networks_are_cut(play: Play) -> None:
    for _ in range(70):
        play.tick(1.0)


def scheduler_is_lost(play: Play) -> None:
    play.connected = False
    for _ in range(20):
        play.tick(0.2)


def output_is_unreadable(play: Play) -> None:
    play.output(2, error="it ends at 3 bytes")


def results_lost(what: str, error: Exception, *, unreachable: bool = False) -> Callable[[Play], None]:
    return lambda play: play.send(inbox.ArtifactFailed(0, what, error, unreachable=unreachable))


STEP_5 = "checkpoint step-5"
LEFT = "returned from the workload while rank 0, 2 waited for it in a collective operation"
EXITED = "the process ended with exit code 0 in the middle of the workload"
SILENT = "no message came from {} for 60 s: is it down, or the network to it?"
OWN_WORKER = "the Dask worker (pid 7) ended: killed by SIGKILL"
# What goes wrong in a training of three ranks: the root cause (rank, kind, line), and the ranks that are only victims.
CASES: list[tuple[str, Callable[[Play], object], tuple[int, str, str], tuple[int, ...]]] = [
    ("raises", lambda play: play.fail(1), (1, "exception", "ValueError: rank 1"), ()),
    ("raises, victim", raises_and_takes_a_victim, (1, "exception", "ValueError: rank 1"), (0,)),
    ("victim first", victim_is_heard_first, (1, "exception", "ValueError: rank 1"), (2,)),
    ("two fail", two_fail_and_the_second_is_heard_first, (0, "exception", "ValueError: rank 0"), ()),
    ("clean-up", fails_in_a_long_clean_up, (1, "exception", "ValueError: rank 1"), (0,)),
    ("only victims", only_victims, (1, "exception", "ValueError: rank 1"), (1, 2)),
    ("returns early", rank_returns_early, (1, "exit", LEFT), (0, 2)),
    ("sys.exit", lambda play: play.fail(1, exit_code=42), (1, "exit", "ValueError: rank 1"), ()),
    ("os._exit", lambda play: play.exit(1, 0), (1, "exit", EXITED), ()),
    ("memory", lambda play: play.exit(2, -9, reason="no memory"), (2, "signal", "killed by SIGKILL: no memory"), ()),
    ("SIGTERM from others", lambda play: play.exit(2, -15), (2, "signal", "killed by SIGTERM"), ()),
    ("cannot start", lambda play: play.news(1, broken="no server"), (1, "infrastructure", "no server"), ()),
    ("worker", worker_is_lost, (1, "worker_lost", "the Dask worker tcp://h1 of host h1 was lost"), ()),
    ("worker, files", worker_is_lost_with_a_failure_in_its_files, (1, "exception", "OSError: no disk"), ()),
    ("network", network_is_cut, (1, "worker_lost", SILENT.format("host h1")), ()),
    ("all networks", all_networks_are_cut, (0, "worker_lost", SILENT.format("the cluster")), ()),
    ("scheduler", scheduler_is_lost, (0, "worker_lost", "the Dask scheduler has ended"), ()),
    ("own worker", lambda play: play.tick(0.1, worker_fault=OWN_WORKER), (0, "worker_lost", OWN_WORKER), ()),
    ("task", lambda play: play.send(inbox.TaskFailed(1, 2, "it ended")), (2, "infrastructure", "it ended"), ()),
    ("output", output_is_unreadable, (2, "infrastructure", "its output could not be read: it ends at 3 bytes"), ()),
    ("disk", results_lost(STEP_5, OSError("full")), (0, "results", f"{STEP_5} could not be saved: full"), ()),
    (
        "file out of reach",  # the training may go on elsewhere
        results_lost(STEP_5, OSError("no route"), unreachable=True),
        (0, "infrastructure", f"{STEP_5} could not be saved: no route"),
        (),
    ),
    (
        "refused path",
        results_lost("x", UnsafePath("it leads out")),
        (0, "refused", "x could not be saved: it leads out"),
        (),
    ),
]
CODES = {"worker_lost": 4, "infrastructure": 4, "results": 4, "hang": 5}


@pytest.mark.parametrize(("happens", "cause", "victims"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
def test_root_cause_is_found_and_every_rank_ends(
    happens: Callable[[Play], object], cause: tuple[int, str, str], victims: tuple[int, ...]
) -> None:
    play = Play().start()
    happens(play)
    play.wait(4.0)
    play.obey()
    play.wait(GRACE_S + 4.0)
    assert play.attempt.over
    assert (play.cause.rank, play.cause.kind, play.cause.line) == cause
    assert play.cause.exit_code == CODES.get(cause[1], 1)
    assert tuple(sorted(fault.rank for fault in play.attempt.faults if fault.victim)) == victims


def test_other_ranks_start_with_the_port_of_rank_0s_store() -> None:
    play = Play()
    assert play.all("submit") == [((0,), 0)]
    play.news(1, store_port=99)  # only rank 0 has the store
    assert len(play.all("submit")) == 1
    play.news(store_port=PORT)
    play.news(store_port=99)  # a repetition
    assert play.all("submit") == [((0,), 0), ((1, 2), PORT)]


def test_ranks_of_rank_0s_worker_start_with_it_and_others_when_the_store_is_open() -> None:
    play = Play(4, two_a_host=True)
    play.news(store_port=PORT)
    assert play.all("submit") == [((0, 1), 0), ((2, 3), PORT)]


def test_store_that_opens_while_the_group_is_stopping_starts_nobody() -> None:
    play = Play()
    play.exit(0, 1)
    play.wait(1.0)
    play.news(store_port=PORT)
    assert [ranks for ranks, _ in play.all("submit")] == [(0,)]
    assert play.attempt.over
    assert play.stops() == []  # there is nobody to stop


OLD = [
    News(1, (RankNews(0, 10, 10, cpu_s=5.0, ended=RankExit(5, 1, 5)),), PORT, leaving=True, worker="tcp://h0"),
    News(1, (RankNews(77),), worker="tcp://h77"),
    inbox.TaskFailed(1, 0, "late"),
]


@pytest.mark.parametrize("message", OLD, ids=lambda message: type(message).__name__)
def test_late_messages_of_an_earlier_attempt_are_ignored(message: inbox.Message) -> None:
    play = Play(attempt=2)
    play.done.clear()
    play.send(message)
    assert play.done == [] and play.attempt.due() == math.inf and play.attempt.running == 3


def test_news_of_a_rank_that_does_not_exist_are_counted() -> None:
    play = Play().start()
    play.done.clear()
    play.send(News(1, (RankNews(3, 10, 10),), worker="tcp://h1"))
    assert play.all("reject") == ["news of tcp://h1 about ranks that it does not have"] and len(play.done) == 1


def test_exception_that_a_rank_handles_is_no_fault_if_another_cause_is_known() -> None:
    play = Play().start()
    play.exit(2, -9)
    play.tick(0.2)
    play.fail(1, at_s=play.now - 5, handled=True)
    play.obey()
    assert (play.cause.rank, play.cause.kind) == (2, FaultKind.SIGNAL)
    assert play.attempt.ranks[1].fault is None


# Settling: the root cause may arrive after its victims.


def test_root_cause_that_arrives_a_second_after_its_victim_is_waited_for() -> None:
    play = Play().start()
    play.fail(0, lost_peer=True)
    play.wait(1.0)
    assert play.stops() == []
    play.fail(1, at_s=play.now)
    play.tick(0.14)
    assert play.stops() == []
    play.tick(0.02)
    assert play.stops() == [(1.16, (0, 2), GRACE_S)]  # 0.15 s after the root cause
    assert play.cause.rank == 1


def test_others_are_stopped_at_once_if_every_rank_has_failed_or_ended_and_one_is_no_victim() -> None:
    play = Play().start()
    play.fail(0, lost_peer=True)
    play.exit(1, -9)
    play.tick(0.1)
    assert play.stops() == []  # rank 2 may have failed first
    play.fail(2, lost_peer=True)
    play.tick()
    assert play.stops() == [(0.1, (0, 2), GRACE_S)]
    assert play.cause.rank == 1


def test_clean_up_of_the_rank_that_failed_is_spared_for_two_seconds() -> None:
    play = Play().start()
    play.fail(1)
    play.tick(0.15)
    play.tick(1.99)
    assert [ranks for _, ranks, _ in play.stops()] == [(0, 2)]
    play.tick(0.02)
    assert play.stops()[-1] == (2.16, (0, 1, 2), GRACE_S)


def test_rank_that_does_not_end_is_given_up_three_seconds_after_its_grace_period() -> None:
    play = Play().start()
    play.fail(1)
    play.exit(1, 1)
    play.tick(0.15)
    play.exit(0, -9)
    play.tick(GRACE_S + 2.99)
    assert play.attempt.running == 1
    play.tick(0.02)
    assert play.attempt.over
    assert play.all("ended") == [
        (1, False, False),
        (0, False, True),
        (2, False, True),
    ]


def test_exit_code_after_the_end_of_the_work_is_a_warning_only() -> None:
    play = Play().start()
    play.event(0, events.Finished(1))
    play.exit(0, -11)
    assert play.texts() == ["rank 0 finished its work, and ended with killed by SIGSEGV afterwards"]
    assert play.attempt.faults == []


# Signals to the driver.


@pytest.mark.parametrize(
    ("signals", "stops", "notice"),
    [
        ([signal.SIGINT], [], "the driver was sent SIGINT"),
        ([signal.SIGHUP], [], "the driver was sent SIGHUP"),
        ([signal.SIGTERM], [], "the driver was sent SIGTERM"),
        ([signal.SIGINT, signal.SIGINT], [(1.0, (0, 1, 2), GRACE_S)], None),
        ([signal.SIGTERM, signal.SIGINT], [(1.0, (0, 1, 2), GRACE_S)], None),
        ([signal.SIGINT] * 3, [(1.0, (0, 1, 2), GRACE_S), (2.0, (0, 1, 2), 0.0)], None),
    ],
)
def test_first_signal_saves_the_second_stops_the_third_kills(
    signals: list[int], stops: list[tuple[float, tuple[int, ...], float]], notice: str | None
) -> None:
    play = Play().start()
    for number, signum in enumerate(signals):
        play.now = 100.0 + number
        play.send(inbox.SignalReceived(signum))
    assert play.stops() == stops
    end = play.attempt.end()
    assert (end.signum, end.notice) == (signals[-1], notice)
    preempts = [sent for sent in play.commands() if sent[1] == "preempt"]
    assert preempts == [(0.0, "preempt", (0, 1, 2))]


# Preemption.


@pytest.mark.parametrize(("grace_s", "deadline_s"), [(20.0, 17.0), (12.0, 9.0), (8.0, 6.0), (2.0, 1.5)])
def test_preemption_ends_within_the_grace_period(grace_s: float, deadline_s: float) -> None:
    play = Play(grace_s=grace_s).start()
    play.send(inbox.SignalReceived(signal.SIGTERM))
    play.tick(deadline_s - 0.01)
    assert play.stops() == []
    play.tick(0.02)
    assert play.stops() == [(round(deadline_s + 0.01, 3), (0, 1, 2), 1.0)]
    assert "the ranks did not call ctx.checkpoint() in time: they are stopped" in play.texts()
    play.tick(1.0 + 3.0 - 0.01)
    assert not play.attempt.over
    play.tick(0.02)
    assert play.attempt.over


def test_ranks_that_have_saved_and_wait_for_their_trackers_are_stopped_without_a_warning() -> None:
    play = Play().start()
    play.send(inbox.SignalReceived(signal.SIGTERM))
    for rank in range(3):
        play.event(rank, events.Preempted(1, 5))
    play.tick(17.01)
    assert play.stops() == [(17.01, (0, 1, 2), 1.0)]
    assert not any("in time" in text for text in play.texts())


@pytest.mark.parametrize(
    ("tracking", "grace_s", "stop_s"), [({}, 20.0, 1.0), ({"x": 1}, 20.0, 10.0), ({"x": 1}, 4.0, 4.0)]
)
def test_preemption_before_all_ranks_have_entered_stops_them_at_once(
    tracking: dict[str, int], grace_s: float, stop_s: float
) -> None:
    play = Play(grace_s=grace_s, tracking=tracking).start(entered=False)
    play.event(0, events.Entered(1))
    play.event(1, events.Noticed(1))
    assert play.stops() == [(0.0, (0, 1, 2), stop_s)]
    assert play.commands() == []
    assert play.attempt.outcome.notice == "rank 1 on host h1 was sent SIGTERM"


def test_preemption_while_stopping_changes_nothing() -> None:
    play = Play().start()
    play.fail(1)
    play.tick(0.2)
    play.news(leaving=True)
    assert play.attempt.outcome.notice is None and play.commands() == []
    assert play.attempt.outcome.leaving  # the next attempt avoids the worker nevertheless


def test_rank_that_dies_of_sigterm_during_a_preemption_has_nothing_to_save() -> None:
    play = Play().start()
    play.send(inbox.SignalReceived(signal.SIGTERM))
    play.exit(1, -signal.SIGTERM)
    assert play.stops() == [(0.0, (0, 2), 1.0)]
    assert play.attempt.faults == []


def test_rank_that_ends_with_75_before_it_hears_of_the_preemption_is_preempted() -> None:
    play = Play().start()
    play.event(0, events.Noticed(1))
    play.event(1, events.Failure(1, "SystemExit", "75", "", exit_code=75))
    assert play.attempt.ranks[1].preempted and play.attempt.faults == []
    other = Play().start()
    other.event(1, events.Failure(1, "SystemExit", "75", "", exit_code=75))
    assert [fault.status for fault in other.attempt.faults] == [75]


def test_next_attempt_avoids_a_worker_that_is_leaving() -> None:
    play = Play().start()
    play.news(2, leaving=True)
    assert play.all("avoid") == ["tcp://h2"] and play.all("forget") == []
    assert play.attempt.end().leaving and play.attempt.outcome.notice == "the worker on host h2 was sent SIGTERM"
    assert play.commands() == [(0.0, "preempt", (0, 1, 2))]


def test_cut_that_is_shorter_than_lost_after_s_is_survived() -> None:
    play = Play().start()
    for second in range(118):
        play.alive(0)
        play.alive(2)
        if second % 59 == 0:
            play.alive(1)
        play.tick(1.0)
    assert play.attempt.faults == [] and play.stops() == []


def test_time_in_which_the_driver_was_suspended_counts_for_nothing() -> None:
    play = Play(hang_timeout_s=10.0).start()
    for rank in range(3):
        play.event(rank, events.Progress(1, 1.0))
    play.wait(1.0)
    play.tick(3600.0)
    play.tick(0.1)
    assert play.attempt.faults == [] and play.commands() == [] and play.stops() == []
    play.wait(9.5)
    assert [sent[1] for sent in play.commands()] == ["stacks"]  # 10 s of the ranks' own time have passed


def test_messages_that_wait_are_read_before_a_worker_is_given_up() -> None:
    play = Play().start()
    for _ in range(65):
        play.tick(1.0, read_until=0.0)
    assert play.attempt.faults == []


def test_driver_that_is_always_behind_gives_up_a_silent_worker() -> None:
    """What had arrived when the inbox was marked has been read; later messages may still wait."""
    play = Play().start()
    for _ in range(65):
        play.tick(1.0, read_until=play.now - 29.0)
    assert not play.attempt.faults
    for _ in range(30):
        play.tick(1.0, read_until=play.now - 29.0)
    assert {fault.kind for fault in play.attempt.faults} == {FaultKind.WORKER_LOST}


# Hangs.


def asks(play: Play, frames: dict[int, tuple[str, ...]], sequences: dict[int, int]) -> None:
    """The ranks answer the command to report their stacks."""
    for rank, stack in frames.items():
        play.event(rank, events.Stacks(1, stack, sequences[rank]))
        play.event(rank, events.FileSaved(1, f"stacks/rank-{rank}.txt", "s", 1, ""))


def test_hang_is_found_by_the_stacks_and_ends_the_attempt() -> None:
    play = Play(hang_timeout_s=10.0).start()
    for rank in range(3):
        play.event(rank, events.Progress(1, 1.0))
    play.wait(9.9)
    assert play.commands() == []
    play.wait(0.3)
    ((_, command, ranks),) = play.commands()
    assert (command, ranks) == ("stacks", (0, 1, 2))
    assert "no report or line for 10 s" in play.texts()
    asks(play, {0: REDUCING, 1: BUSY, 2: REDUCING}, {0: 7, 1: 6, 2: 7})
    assert (play.cause.rank, play.cause.kind, play.cause.exit_code) == (1, FaultKind.HANG, ExitCode.HANG)
    assert [(ranks, grace_s) for _, ranks, grace_s in play.stops()] == [((0, 1, 2), 2.0)]
    assert sorted(rank for rank, _ in play.all("transfer")) == [0, 1, 2]
    play.obey()
    assert play.attempt.over


def test_rank_at_work_is_no_hang_and_its_stacks_are_not_kept() -> None:
    play = Play(hang_timeout_s=10.0).start()
    for rank in range(3):
        play.event(rank, events.Progress(1, 1.0))
    for second in range(11):
        play.alive(0)
        play.alive(1, cpu_s=float(second))
        play.alive(2)
        play.tick(1.0)
    assert [sent[1] for sent in play.commands()] == ["stacks"]
    asks(play, {0: REDUCING, 1: BUSY, 2: REDUCING}, {0: 7, 1: 6, 2: 7})
    assert play.attempt.faults == [] and play.stops() == [] and play.all("transfer") == []


def test_rank_that_finishes_while_the_ranks_are_asked_has_not_left_those_that_waited_for_it_then() -> None:
    play = Play(hang_timeout_s=10.0).start()
    for rank in range(3):
        play.event(rank, events.Progress(1, 1.0))
    play.wait(10.2)
    assert [sent[1] for sent in play.commands()] == ["stacks"]
    asks(play, {1: REDUCING, 2: REDUCING}, {1: 7, 2: 7})
    play.event(0, events.Finished(1))  # it came to the operation, and they will end as well
    play.exit(0)
    play.wait(1.0)
    assert play.attempt.faults == [] and play.stops() == []
    play.wait(6.0)
    assert [sent[1] for sent in play.commands()] == ["stacks", "stacks"]  # asked after its end, they still wait
    asks(play, {1: REDUCING, 2: REDUCING}, {1: 7, 2: 7})
    assert (play.cause.rank, play.cause.message.split(" while")[0]) == (0, "returned from the workload")


def test_time_out_in_a_collective_asks_for_stacks_before_the_group_is_stopped() -> None:
    play = Play().start()
    play.fail(0, timed_out=True)
    assert play.commands() == [(0.0, "stacks", (0, 1, 2))]
    play.wait(2.0)
    assert play.stops() == []  # the wait for victims is over, that for the answers is not
    play.exit(0, 1)
    asks(play, {1: BUSY, 2: REDUCING}, {1: 6, 2: 7})
    assert (play.cause.rank, play.cause.kind) == (1, FaultKind.HANG)


# Results, scripts, trackers.


def test_loss_of_the_results_ends_the_run() -> None:
    play = Play().start()
    lost = ResultsError("another driver has the run")
    play.send(inbox.ResultsLost(lost))
    assert play.stops() == [(0.0, (0, 1, 2), GRACE_S)]
    play.obey()
    end = play.attempt.end()
    assert play.attempt.over and end.loss is lost and end.fault is None


@pytest.mark.parametrize(
    ("status", "finished", "preempted", "fails"),
    [(0, True, False, False), (75, False, True, False), (3, False, False, True)],
)
def test_exit_of_a_script_is_an_end_like_any_other(status: int, finished: bool, preempted: bool, fails: bool) -> None:
    play = Play(script="train.py").start()
    play.exit(1, status)
    rank = play.attempt.ranks[1]
    assert (rank.finished, rank.preempted, bool(play.attempt.faults)) == (finished, preempted, fails)


def test_checkpoints_on_their_way_are_counted_until_they_are_stored_or_lost() -> None:
    play = Play().start()
    saved = events.CheckpointSaved(1, 5, "s", ())
    for _ in range(3):
        play.event(0, saved)
    assert play.attempt.transfers == 3
    assert play.all("transfer") == [(0, saved)] * 3
    play.send(inbox.ArtifactRetried(0, "checkpoint step-5", OSError("busy"), "failure 2 of 5; again in 2 s"))
    play.send(inbox.ArtifactStored(0, "/r/checkpoints/step-5", 5))
    play.send(inbox.ArtifactFailed(0, "tracking file x", OSError("no"), vital=False))
    assert play.attempt.transfers == 1 and play.attempt.faults == []
    assert play.texts() == [
        "checkpoint step-5 could not be saved (failure 2 of 5; again in 2 s): busy",
        "tracking file x of rank 0 could not be saved: no",
    ]


def test_result_that_cannot_be_stored_after_the_ranks_have_ended_is_still_the_fault() -> None:
    play = Play().start()
    play.event(0, events.CheckpointSaved(1, 5, "s", ()))
    for rank in range(3):
        play.finish(rank)
    assert play.attempt.over
    play.send(inbox.ArtifactFailed(0, "checkpoint step-5", ClusterError("it is lost")))
    assert (play.cause.kind, play.attempt.transfers) == (FaultKind.RESULTS, 0)


def test_rank_that_its_worker_never_begins_with_ends_the_attempt() -> None:
    play = Play()
    play.news(store_port=PORT)
    for _ in range(31):
        play.alive(0)
        play.alive(1)
        play.tick(1.0)
    assert (play.cause.rank, play.cause.kind) == (2, FaultKind.INFRASTRUCTURE)
    assert "has not started it within 30 s" in play.cause.line


def test_signal_for_the_ranks_reaches_those_in_the_workload_and_ends_nothing() -> None:
    play = Play().start(entered=False)
    sent = inbox.SignalReceived(signal.SIGUSR1, inbox.Request.FORWARD)
    play.send(sent)
    assert play.commands() == []
    play.event(1, events.Entered(1))
    play.event(2, events.Entered(1))
    play.exit(2, -9)
    play.send(sent)
    assert play.commands() == [(0.0, "user-1", (1,))]
    assert play.attempt.signals == 0 and play.attempt.outcome.signum is None


def test_request_to_stop_now_kills_with_the_first_signal() -> None:
    play = Play().start()
    play.send(inbox.SignalReceived(signal.SIGINT, inbox.Request.STOP_NOW))
    assert play.stops() == [(0.0, (0, 1, 2), 0.0)]
