"""Signals to the driver are messages, and interrupt only what merely waits."""

from __future__ import annotations

import os
import queue
import signal
import sys
from types import FrameType
from typing import Any

import pytest

from ddptrain.driver.control.signals import Signals, ThreadSignals, signals_to
from ddptrain.driver.inbox import Inbox, SignalReceived
from ddptrain.errors import Interrupted


def test_signal_becomes_a_message_and_interrupts_nothing() -> None:
    inbox: Inbox = queue.SimpleQueue()
    with signals_to(inbox):
        os.kill(os.getpid(), signal.SIGTERM)
        assert inbox.get(timeout=60) == SignalReceived(signal.SIGTERM)


def test_signal_ends_a_wait() -> None:
    inbox: Inbox = queue.SimpleQueue()
    with signals_to(inbox) as signals:

        def wait() -> None:
            with signals.interrupting():
                os.kill(os.getpid(), signal.SIGINT)
                queue.SimpleQueue[int]().get(timeout=60)

        with pytest.raises(Interrupted) as caught:
            wait()
    assert caught.value.exit_code == 130


def test_signal_that_came_before_a_wait_ends_it() -> None:
    inbox: Inbox = queue.SimpleQueue()
    with signals_to(inbox) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        inbox.get(timeout=60)
        with pytest.raises(Interrupted), signals.interrupting():
            pytest.fail("the wait began")


def test_what_was_ignored_stays_ignored_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_to(queue.SimpleQueue()):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != before
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert signal.getsignal(signal.SIGTERM) == before


def test_signals_of_a_thread_reach_its_run_alone_and_end_its_waits() -> None:
    inbox: Inbox = queue.SimpleQueue()
    signals = ThreadSignals(inbox)
    signals.pause(0.0)
    with signals.interrupting():
        signals.send(signal.SIGTERM)
        with pytest.raises(Interrupted):
            signals.check()
    with pytest.raises(Interrupted):
        signals.pause(60.0)
    with pytest.raises(Interrupted), signals.interrupting():
        pytest.fail("a signal that was received before ends the block")
    assert signals.taken == [signal.SIGTERM]
    assert inbox.get_nowait() == SignalReceived(signal.SIGTERM)


def test_fourth_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    signals = Signals(queue.SimpleQueue())
    assert (signals.asked, signals.taken) == (False, [])
    signals.take(signal.SIGTERM, None)
    signals.take(signal.SIGINT, None)
    signals.take(signal.SIGINT, None)
    assert ended == []
    signals.take(signal.SIGTERM, None)
    assert ended == [143] and signals.taken == [15, 2, 2, 15]


@pytest.mark.parametrize("line", [1, 2, 3])
def test_signal_at_any_line_before_a_wait_ends_it(line: int) -> None:
    signals, lines, waited = Signals(queue.SimpleQueue()), list[int](), list[bool]()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_name == "interrupting" and event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == line:
                signals.take(signal.SIGTERM, None)
        return trace

    def wait() -> None:
        with signals.interrupting():
            waited.append(True)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(Interrupted):
            wait()
    finally:
        sys.settrace(before)
    assert waited == []


def test_wait_is_interrupted_once_and_only_within_its_block() -> None:
    signals = Signals(queue.SimpleQueue())
    with signals.interrupting():
        with pytest.raises(Interrupted):
            signals.take(signal.SIGINT, None)
        signals.take(signal.SIGINT, None)
    late = Signals(queue.SimpleQueue())
    with late.interrupting():
        pass
    late.take(signal.SIGINT, None)
    with pytest.raises(Interrupted) as first:
        signals.check()
    assert first.value.signum == signal.SIGINT


@pytest.mark.parametrize("taken", [[], [signal.SIGTERM, signal.SIGINT]])
def test_signal_that_an_outer_block_has_received_is_sent_again(
    monkeypatch: pytest.MonkeyPatch, taken: list[int]
) -> None:
    sent: list[tuple[int, int]] = []
    with signals_to(queue.SimpleQueue()) as outer:
        outer.taken += taken
        monkeypatch.setattr(os, "kill", lambda pid, signum: sent.append((pid, signum)))
        with signals_to(queue.SimpleQueue()) as inner:
            assert inner is not outer and inner.taken == []
    assert sent == [(os.getpid(), signum) for signum in taken[:1]]


def test_signal_of_another_thread_is_sent_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: sent.append((pid, signum)))
    Signals(queue.SimpleQueue()).send(signal.SIGINT)
    assert sent == [(os.getpid(), signal.SIGINT)]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_each_signal_that_asks_to_end_is_handled(signum: int) -> None:
    inbox: Inbox = queue.SimpleQueue()
    with signals_to(inbox):
        os.kill(os.getpid(), signum)
        assert inbox.get(timeout=60) == SignalReceived(signum)
