"""Signals while clusters start and end."""

from __future__ import annotations

import os
import signal

import pytest

from ddptrain.clusters.signals import deferred, interruptible
from ddptrain.errors import ClusterError, Interrupted


def test_signal_in_a_deferred_block_arrives_at_its_end_or_when_it_asks() -> None:
    seen: list[str] = []

    def blocked(*, asks: bool) -> None:
        with interruptible(), deferred() as deliver:
            os.kill(os.getpid(), signal.SIGTERM)
            seen.append("saved")
            if asks:
                deliver()
                seen.append("not reached")

    for asks in (False, True):
        with pytest.raises(Interrupted):
            blocked(asks=asks)
    assert seen == ["saved", "saved"]


def test_second_signal_breaks_into_a_block_that_allows_it() -> None:
    def blocked() -> None:
        with interruptible(), deferred(breakable=True):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("the second was delayed")

    with pytest.raises(Interrupted):
        blocked()


def test_error_of_a_library_after_a_signal_is_an_interruption_and_others_stay_what_they_are() -> None:
    def broken(error: Exception, *, by_signal: bool) -> None:
        with interruptible():
            try:
                if by_signal:
                    os.kill(os.getpid(), signal.SIGTERM)
            except Interrupted as cause:
                raise error from cause
            raise error

    with pytest.raises(Interrupted):
        broken(RuntimeError("can't start new thread"), by_signal=True)
    for error in (RuntimeError("of its own"), ClusterError("x")):
        with pytest.raises(type(error), match=str(error)):
            broken(error, by_signal=False)
