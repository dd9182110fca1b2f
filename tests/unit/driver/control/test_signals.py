"""Signals to the driver are messages, and interrupt only what merely waits."""

from __future__ import annotations

import os
import queue
import signal

import pytest

from ddptrain.driver.attempt.inbox import Inbox, SignalReceived
from ddptrain.driver.control.signals import ThreadSignals, signals_to
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
