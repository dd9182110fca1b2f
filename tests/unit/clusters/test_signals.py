"""Signals during the start of a cluster: delayed until a step is done, and found beneath the errors of libraries."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from ddptrain.clusters import signals
from ddptrain.clusters.signals import Deferral, deferred, interruptible
from ddptrain.errors import ClusterError, Interrupted


def test_delayed_signals_go_to_the_handlers_of_before_in_order() -> None:
    seen: list[tuple[Any, ...]] = []
    deferral = Deferral(breakable=False)
    deferral.handlers = dict.fromkeys((signal.SIGINT, signal.SIGTERM), lambda *call: seen.append(call))
    deferral.take(signal.SIGTERM, None)
    deferral.take(signal.SIGINT, None)
    assert seen == []
    deferral.deliver()
    deferral.deliver()  # each signal is delivered once
    assert seen == [(signal.SIGTERM, None), (signal.SIGINT, None)]


def test_default_handler_is_set_again_before_the_signal_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, Any]] = []
    monkeypatch.setattr(signal, "signal", lambda *call: done.append(("set", call)))
    monkeypatch.setattr(signal, "raise_signal", lambda number: done.append(("raise", number)))
    deferral = Deferral(breakable=False)
    deferral.handlers = {signal.SIGTERM: signal.SIG_DFL}
    deferral.take(signal.SIGTERM, None)
    monkeypatch.setattr(signals, "callable", lambda handler: False, raising=False)
    deferral.deliver()
    assert done == [("set", (signal.SIGTERM, signal.SIG_DFL)), ("raise", signal.SIGTERM)]


@pytest.mark.parametrize(("breakable", "seen_after"), [(False, [0, 0]), (True, [0, 2])])
def test_second_signal_is_delivered_at_once_if_the_block_is_breakable(breakable: bool, seen_after: list[int]) -> None:
    seen: list[int] = []
    deferral = Deferral(breakable)
    deferral.handlers = {signal.SIGINT: lambda number, frame: seen.append(number)}
    counts = []
    for _ in range(2):
        deferral.take(signal.SIGINT, None)
        counts.append(len(seen))
    assert counts == seen_after


def test_third_signal_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    deferral = Deferral(breakable=False)
    for expected in ([], [], [130]):
        deferral.take(signal.SIGINT, None)
        assert codes == expected


def test_delayed_signals_are_delivered_after_each_message() -> None:
    order: list[Any] = []
    deferral = Deferral(breakable=False)
    deferral.handlers = {signal.SIGINT: lambda number, frame: order.append(number)}
    deferral.take(signal.SIGINT, None)
    deferral.checked(order.append)("starting")
    assert order == ["starting", signal.SIGINT]


@contextlib.contextmanager
def counted(number: int) -> Iterator[list[int]]:
    """Handle a signal with a list."""
    seen: list[int] = []
    before = signal.signal(number, lambda taken, frame: seen.append(taken))
    try:
        yield seen
    finally:
        signal.signal(number, before)


def test_signal_in_a_deferred_block_arrives_at_its_end() -> None:
    with counted(signal.SIGTERM) as seen:
        with deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == []
        assert seen == [signal.SIGTERM]


def test_error_of_a_library_after_a_signal_is_an_interruption() -> None:
    def library() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            raise RuntimeError("can't start a thread")

    with counted(signal.SIGTERM):
        with pytest.raises(Interrupted) as caught, interruptible():
            library()
        assert caught.value.exit_code == 143
        assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("error", [ClusterError("no"), RuntimeError("no")])
def test_errors_without_a_signal_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error), match="no") as caught, interruptible():
        raise error
    assert caught.value is error
