"""The deadline of a start."""

from __future__ import annotations

import queue
import signal
import time

from ddptrain.driver.control.signals import signals_to
from ddptrain.retrain.retraining import Deadline

PATIENCE_S = 30.0


def test_deadline_sends_sigterm_once() -> None:
    with signals_to(queue.SimpleQueue()) as signals, Deadline(0.01) as deadline:
        end = time.monotonic() + PATIENCE_S
        while not signals.taken:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert deadline.is_reached and signals.taken == [signal.SIGTERM]


def test_start_that_ends_in_time_is_not_signalled() -> None:
    with signals_to(queue.SimpleQueue()) as signals:
        with Deadline(0.05) as deadline:
            pass
        time.sleep(0.1)
        assert not deadline.is_reached and not signals.taken


def test_no_deadline() -> None:
    with Deadline(None) as deadline:
        assert not deadline.is_reached


def test_signal_that_nobody_has_handled_reaches_an_inner_receiver() -> None:
    with signals_to(queue.SimpleQueue()) as outer:
        signal.raise_signal(signal.SIGTERM)
        with signals_to(queue.SimpleQueue()) as inner:
            assert inner.taken == [signal.SIGTERM]
        assert outer.taken == [signal.SIGTERM]
