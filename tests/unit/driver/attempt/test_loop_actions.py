"""What the loop of an attempt does for each action that a step asks for, with stand-ins for everything around it."""

from __future__ import annotations

import dataclasses
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.driver.attempt import actions, inbox, loop
from ddptrain.driver.attempt.loop import Attempt
from ddptrain.driver.failure.fault import Fault, FaultKind, Loss
from ddptrain.protocol import events
from ddptrain.protocol.commands import Command
from ddptrain.protocol.worker_notices import RankExit, SystemSample
from tests.support import fake_time
from tests.unit.driver.attempt.ranks import running
from tests.unit.notes import Notes, noted

ENDED = RankExit(1, 1, 42, 0, 9, 1, 1)
FAULT = Fault(1, FaultKind.EXCEPTION, 5, "no")
SAMPLE = SystemSample(1, 0, 5, "h", {}, {})
SAVED = events.CheckpointSaved(1, 7, "staging-7", ())
FILE = events.FileSaved(1, "a/b", "staging-f", 3, "0" * 64)


class Bench:
    """An attempt with two ranks: rank 0 shares the driver's files, rank 1 does not."""

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []
        ranks = [running(0), running(1)]
        ranks[1] = ranks[1]._replace(place=dataclasses.replace(ranks[1].place, shared=False))
        self.ranks = ranks
        self.attempt = Attempt.__new__(Attempt)
        self.handled: list[Any] = []
        self.grew = True
        self.has = True

        def note(name: str, **returns: Any) -> Any:
            return Notes(self.notes, name, **returns)

        group = note("group", has=lambda address: self.has)
        parts: dict[str, Any] = {
            "worker_group": group,
            "transfer": note("transfer"),
            "recorder": note("recorder", display=note("display")),
            "mirrors": [self._mirror(0), self._mirror(1)],
            "state": SimpleNamespace(ranks=ranks),
            "handle": self.handled.append,
            "_fetching": {},
        }
        for name, part in parts.items():
            setattr(self.attempt, name, part)

    def _mirror(self, rank: int) -> Any:
        found = SimpleNamespace(staging=f"/spool-{rank}")
        return Notes(
            self.notes,
            f"mirror{rank}",
            log_grew=lambda size: self.grew,
            lacks=lambda stream, size: False,
            take_events=lambda: iter(()),
            spool=found,
            refused=0,
        )


@pytest.fixture
def bench() -> Bench:
    return Bench()


def spec(bench: Bench, rank: int) -> Any:
    return bench.ranks[rank].spec


def slot(bench: Bench, rank: int) -> Any:
    return bench.ranks[rank].place.slot


def done(bench: Bench, action: Any) -> list[tuple[Any, ...]]:
    bench.attempt._do(action)
    return bench.notes


def test_ranks_are_submitted_with_the_port_of_the_store(bench: Bench) -> None:
    assert done(bench, actions.SubmitRanks((1,))) == [("group.submit", [spec(bench, 1)], [slot(bench, 1)])]
    bench.notes.clear()
    (call,) = done(bench, actions.SubmitRanks((0, 1), 77))
    assert [each.group.master_port for each in call[1]] == [77, 77] and call[2] == [slot(bench, 0), slot(bench, 1)]


def test_ranks_are_told_and_stopped_by_their_specs(bench: Bench) -> None:
    done(bench, actions.StopRanks((1,), 2.5))
    done(bench, actions.SendCommand((0, 1), Command.STACKS))
    specs = [spec(bench, 0), spec(bench, 1)]
    assert bench.notes == [("group.stop", specs[1:], 2.5), ("group.tell", specs, Command.STACKS)]


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (actions.AvoidWorker("w"), ("group.avoid", "w")),
        (actions.AvoidWorker("w", lost=True), ("group.forget", "w")),
        (actions.RejectNotice("why"), ("group.reject", "why")),
        (actions.RecordSystem(SAMPLE), ("recorder.system", SAMPLE)),
        (actions.RecordFault(FAULT), ("recorder.fault", FAULT)),
        (actions.RecordStored(1, "a/b"), ("recorder.stored", 1, "a/b", None)),
        (actions.Warn("w"), ("recorder.warn", "w")),
        (actions.Announce("a"), ("recorder.notice", "a")),
        (actions.ShowStatus("s"), ("recorder.status", "s")),
    ],
)
def test_action_is_one_call(bench: Bench, action: Any, expected: tuple[Any, ...]) -> None:
    assert done(bench, action) == [expected]


def test_ends_and_the_training_are_recorded_with_the_ranks(bench: Bench) -> None:
    done(bench, actions.RecordTraining())
    done(bench, actions.RecordRankEnd(1, ok=True, stopped=False))
    records = tuple(rank.record() for rank in bench.ranks)
    ended = ("recorder.rank_ended", records[1], {"ok": True, "stopped": False})
    assert bench.notes == [("recorder.training", records), ended]
    bench.notes.clear()
    bench.attempt.mirrors[1]._returns["refused"] = 3  # type: ignore[attr-defined]
    warning = ("recorder.warn", "rank 1 wrote 3 invalid event lines; they were ignored")
    assert done(bench, actions.RecordRankEnd(1, ok=True, stopped=False)) == [warning, ended]


# --- output ---


@pytest.mark.parametrize(
    ("error", "has", "ended", "handled"),
    [
        (OSError("gone"), True, None, [inbox.OutputRead(1, ended=None, error="gone")]),
        (OSError(), True, None, [inbox.OutputRead(1, ended=None, error="OSError()")]),
        (OSError("gone"), False, None, []),  # the loss of the worker is told by itself
        (OSError("gone"), False, ENDED, [inbox.OutputRead(1, ended=ENDED, error="")]),
    ],
)
def test_output_that_cant_be_read_is_an_error_while_the_worker_is_there(
    bench: Bench, error: Exception, has: bool, ended: RankExit | None, handled: list[Any]
) -> None:
    def advance(*sizes: int) -> None:
        raise error

    bench.has = has
    bench.attempt.mirrors[1]._returns["advance"] = advance  # type: ignore[attr-defined]
    done(bench, actions.ReadOutput(1, 100, 50, ended))
    assert bench.handled == handled and ("mirror1.take_events",) in bench.notes


def test_rest_of_the_output_of_a_lost_rank_is_read_where_it_is_shared(bench: Bench) -> None:
    loss = Loss(FaultKind.WORKER_LOST, "gone")
    done(bench, actions.ReadRest(0, loss))
    assert bench.notes == [("mirror0.catch_up",), ("mirror0.take_events",)]
    assert bench.handled == [inbox.OutputRead(0, loss=loss)]


# --- files ---


def test_checkpoints_and_files_are_brought_from_the_place_of_the_rank(bench: Bench) -> None:
    done(bench, actions.FetchArtifact(0, SAVED))
    done(bench, actions.FetchArtifact(0, FILE))
    checkpoint, file = bench.notes
    assert checkpoint == ("transfer.add_checkpoint", 0, SAVED, bench.attempt._source)
    assert file == ("transfer.add_file", 0, FILE, "/spool-0", None)
    assert str(bench.attempt._source(0).staging) == "/spool-0"
    distant = bench.attempt._source(1)
    assert distant.fetch is not None
    distant.fetch(Path("path"), 0, 9)
    assert bench.notes[-1] == ("group.fetch", "tcp://h1", Path("path"), 0, 9)
    with pytest.raises(LookupError):
        bench.attempt._source(-1)
    with pytest.raises(LookupError):
        bench.attempt._source(2)


# --- time ---


class Clock(fake_time.Clock):
    def time_ns(self) -> int:
        return 5


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(loop, "time", made)
    return made


@pytest.mark.parametrize(("due", "timeout_s"), [(None, 0.2), (100.05, 0.05), (99.0, 0.0), (101.0, 0.2)])
def test_message_is_waited_for_until_the_next_deadline(
    bench: Bench, clock: Clock, due: float | None, timeout_s: float
) -> None:
    waits: list[float] = []

    def get(timeout: float) -> Any:
        waits.append(timeout)
        raise queue.Empty

    attempt: Any = bench.attempt
    attempt.state = SimpleNamespace(due=lambda: due)
    attempt.inbox = SimpleNamespace(empty=lambda: True, get=get)
    attempt._handle_next()
    assert waits == [pytest.approx(timeout_s)] and bench.notes == [("recorder.flush",)] and bench.handled == []


def test_step_is_taken_and_its_actions_are_done_in_their_order(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt: Any = bench.attempt
    del attempt.handle
    before, after = attempt.state, SimpleNamespace()
    steps: list[Any] = []
    done: list[Any] = []
    monkeypatch.setattr(loop, "step", lambda *given: noted(steps, given, (after, ["a", "b"])))
    monkeypatch.setattr(loop, "_now", lambda: "now")
    attempt._do, attempt._log_decisions = done.append, done.append
    attempt.handle("message")
    assert steps == [(before, "message", "now")] and attempt.state is after and done == [before, "a", "b"]


def test_new_deadlines_and_inquiries_are_logged(bench: Bench, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    monkeypatch.setattr(loop, "_log", SimpleNamespace(info=lambda text, **fields: logged.append((text, fields))))

    def state(settle: float | None = None, stop: float | None = None, *, under_way: bool = False) -> Any:
        inquiry = SimpleNamespace(under_way=under_way, signs="signs")
        return SimpleNamespace(settle_until=settle, preempt_until=7.0, stop_until=stop, inquiry=inquiry)

    attempt: Any = bench.attempt
    attempt.state = state(101.5, 103.0, under_way=True)
    attempt._log_decisions(state(101.0, 103.0))
    assert logged == [
        ("deadline set", {"deadline": "settle", "in_s": 1.5}),
        ("asking all ranks for their stacks", {"signs_of_life": "signs"}),
    ]
    attempt._log_decisions(attempt.state)
    attempt.state = state(under_way=False)
    attempt._log_decisions(state(101.0, 103.0, under_way=True))
    assert len(logged) == 2


def test_attempt_starts_from_the_limits_that_it_is_given(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[tuple[Any, ...]] = []
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(loop, "LogMirror", lambda *given, **options: made.append((*given, options)))
    group: Any = Notes(notes, "group")
    one = running(1)
    place = dataclasses.replace(one.place, scratch=tmp_path, shared=False)
    ranks = [(one.spec, place, Path("log"))] * 40
    watchdog: Any = "watchdog"
    rest: Any = ("recorder", "inbox", "fault", watchdog, 30.0, 60.0)
    attempt = Attempt(group, ranks, "transfer", *rest)  # type: ignore[arg-type]
    parts: list[object] = [attempt.transfer, attempt.recorder, attempt.inbox, attempt.worker_fault]
    assert parts == ["transfer", "recorder", "inbox", "fault"]
    state = attempt.state
    assert state.watchdog is watchdog and len(state.ranks) == 40 and state.ranks[0].submitted_at == 0.0
    heartbeat = state.heartbeat
    assert (heartbeat.start_timeout_s, heartbeat.lost_after_s, heartbeat.checked_at) == (30.0, 60.0, 100.0)
    assert attempt._tick_s == pytest.approx(0.02) and attempt._ticked_at == 0.0
    (spool, log, options) = made[0]
    assert spool.log.is_relative_to(tmp_path / "r-1" / "attempt-1" / "rank-1") and log == Path("log")
    assert options["shared"] is False
    options["fetch"](Path("x"), 1, 2)
    assert notes == [("group.fetch", "tcp://h1", Path("x"), 1, 2)]
    assert Attempt(group, ranks * 100, "transfer", *rest)._tick_s == 1.0  # type: ignore[arg-type]
