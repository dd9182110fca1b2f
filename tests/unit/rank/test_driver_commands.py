"""What a rank does on each command, and on SIGTERM."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.protocol import events
from ddptrain.protocol.commands import Command
from ddptrain.rank import driver_commands
from ddptrain.rank.driver_commands import CommandHandler
from ddptrain.rank.server import process_control
from tests.support import fake_time
from tests.unit.specs import make_spec


class Bench:
    """A command handler whose parts record what they are asked to do."""

    def __init__(self) -> None:
        self.actions: list[Any] = []
        self.state = "crashed"
        self.calls = SimpleNamespace(saves=False, notified=False, tell_to_end=self._record("end with next checkpoint"))
        tracked = SimpleNamespace(
            is_on=False,
            hurry=lambda grace_s: self.actions.append(("hurry", grace_s)),
            end=lambda state: self.actions.append(("end trackers", state)),
            finish=lambda state: self.actions.append(("finish trackers", state)),
        )
        orders = SimpleNamespace(post=lambda command: self.actions.append(("post", str(command))))
        parts: Any = (None, orders, self.calls, None, tracked, lambda: self.state, self._record("complete saves"))
        parts = (*parts, self._record("report handled"))
        self.handler = CommandHandler(make_spec(grace_s=20.0), *parts)

    def _record(self, action: str) -> Callable[[], None]:
        return lambda: self.actions.append(action)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench()
    monkeypatch.setattr(process_control, "die_of_sigterm", lambda: made.actions.append("die"))
    monkeypatch.setattr(os, "kill", lambda pid, number: made.actions.append(("kill", pid == os.getpid(), number)))
    before = signal.signal(signal.SIGTERM, made.handler._on_sigterm)
    yield made
    signal.signal(signal.SIGTERM, before)


def test_sigterm_is_only_a_notice(bench: Bench) -> None:
    bench.handler._on_sigterm()
    assert bench.actions == [("post", "noticed")]


def test_preempted_rank_that_saves_ends_with_a_checkpoint(bench: Bench) -> None:
    bench.calls.saves = True
    bench.handler._preempt()
    assert bench.calls.notified
    assert bench.actions == [("hurry", 17.0), "end with next checkpoint"]


def test_preempted_rank_that_never_saves_ends_at_once(bench: Bench) -> None:
    bench.handler._preempt()
    assert bench.actions == [("hurry", 17.0), ("finish trackers", "preempted"), "die"]


def test_preempted_rank_with_a_handler_of_its_own_is_sent_sigterm(bench: Bench) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)
    bench.handler._preempt()
    assert bench.actions == [("hurry", 17.0), ("kill", True, signal.SIGTERM)]


def test_preempted_rank_that_has_already_ended_is_left_alone(bench: Bench) -> None:
    bench.state, bench.calls.saves = "finished", True
    bench.handler._preempt()
    assert bench.actions == [("hurry", 17.0)]


def test_stopped_rank_completes_its_checkpoint_and_its_trackers(bench: Bench) -> None:
    bench.state = "failed"
    bench.handler._stop()
    trackers = [("end trackers", "failed"), "complete saves", ("finish trackers", "failed")]
    assert bench.actions == ["report handled", ("hurry", 20.0), *trackers, "die"]


def test_stopped_rank_with_a_handler_of_its_own_decides_itself_how_it_ends(bench: Bench) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)
    bench.handler._stop()
    assert bench.actions == ["report handled", ("hurry", 20.0), "complete saves"]


def test_forked_child_ends_on_sigterm(bench: Bench) -> None:
    bench.handler._on_fork()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(("state", "pauses"), [("finished", [1.0]), ("crashed", [])])
def test_stopped_rank_that_has_finished_with_trackers_may_exit_by_itself(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, state: str, pauses: list[float]
) -> None:
    slept: list[float] = []
    fake_time.replace(monkeypatch, "sleep", slept.append)
    bench.state = state
    bench.handler._stop()
    assert slept == [], "it has no trackers"
    bench.handler.tracked.is_on = True  # type: ignore[misc]
    bench.handler._stop()
    assert slept == pauses


def test_handler_listens_to_sigterm_forks_and_each_command(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    emitted: list[Any] = []
    handlers: dict[Command, Any] = {}
    at_fork: list[Any] = []

    class Reporter:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

        def report(self) -> None:
            emitted.append(self.parts)

    orders = SimpleNamespace(on=handlers.__setitem__, listen=lambda: emitted.append(f"listens to {len(handlers)}"))
    parts = vars(bench.handler) | {"commands": orders, "emitter": SimpleNamespace(emit=emitted.append)}
    handler = CommandHandler(**parts)
    monkeypatch.setattr(driver_commands, "StackReporter", Reporter)
    monkeypatch.setattr(os, "register_at_fork", lambda *, after_in_child: at_fork.append(after_in_child))
    handler.start()
    assert signal.getsignal(signal.SIGTERM) == handler._on_sigterm and at_fork == [handler._on_fork]
    handlers[Command.NOTICED]()
    handlers[Command.STACKS]()
    listening, noticed, reporter = emitted
    assert listening == "listens to 7" and isinstance(noticed, events.Noticed)
    assert reporter == (handler.spec, handler.emitter, handler.collective_calls)
    others = (Command.PREEMPT, Command.STOP)
    assert [handlers[command] for command in others] == [handler._preempt, handler._stop]


def test_forked_child_keeps_a_handler_of_the_users_code(bench: Bench) -> None:
    own = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    bench.handler._on_fork()
    assert signal.signal(signal.SIGTERM, own) is signal.SIG_IGN


@pytest.mark.parametrize(("grace_s", "trackers_s"), [(20.0, 17.0), (12.0, 9.0), (4.0, 3.0)])
def test_driver_keeps_a_part_of_the_grace_period_for_itself(bench: Bench, grace_s: float, trackers_s: float) -> None:
    bench.state = "finished"
    handler = CommandHandler(**(vars(bench.handler) | {"spec": make_spec(grace_s=grace_s)}))
    handler._preempt()
    assert bench.actions == [("hurry", trackers_s)]
