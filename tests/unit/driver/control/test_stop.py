"""Signals to a driver, and requests to stop."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddptrain.driver.control.signals import Signals, ThreadSignals, signals_to
from ddptrain.driver.control.stop import REQUEST, StopRequest, StopTarget, stop_requests, stop_run
from ddptrain.driver.inbox import Inbox, Request, SignalReceived
from ddptrain.errors import ClusterError, ExitCode, Interrupted
from ddptrain.results.errors import ResultsError
from ddptrain.results.run import Run
from ddptrain.results.run_record import RunStatus
from ddptrain.results.run_writer import RunWriter
from tests.support.command import wait_until

# --- A request in the run directory is a signal to its driver, and to no other process ---


def text(request: StopRequest) -> str:
    return REQUEST.dump_json(request).decode()


OURS = StopRequest(os.getpid(), socket.gethostname(), now=False, by="me@here")


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RunWriter]:
    with RunWriter.create(tmp_path, "a-run", "n", "failure: {grace_s: 0.5}\n", "w") as made:
        yield made


@pytest.fixture
def signals(writer: RunWriter) -> Iterator[Signals]:
    """Those of a driver that looks for requests."""
    inbox: Inbox = queue.SimpleQueue()
    with signals_to(inbox) as taken, stop_requests(writer, taken):
        yield taken


def ask(writer: RunWriter, request: StopRequest | str) -> None:
    """Put it there, and wait until it is gone."""
    beside = writer.layout.root / "beside"
    beside.write_text(request if isinstance(request, str) else text(request))
    beside.replace(writer.layout.stop_json)
    wait_until(lambda: not writer.layout.stop_json.exists())


def message(signals: Signals) -> SignalReceived:
    taken = signals.inbox.get(timeout=60)
    assert isinstance(taken, SignalReceived)
    return taken


def test_request_is_sigterm_once_however_often_it_is_made(writer: RunWriter, signals: Signals) -> None:
    ask(writer, OURS)
    assert message(signals) == SignalReceived(signal.SIGTERM)
    ask(writer, OURS)
    ask(writer, "{}")  # once it is gone, what was asked before it has been done
    assert signals.taken == [signal.SIGTERM]
    assert '"event":"stop_requested","now":false,"by":"me@here"' in writer.layout.events_jsonl.read_text()


def test_request_for_now_kills_once_and_is_never_a_fourth_signal(writer: RunWriter, signals: Signals) -> None:
    ask(writer, OURS)
    ask(writer, replace(OURS, now=True))
    ask(writer, replace(OURS, now=True))
    ask(writer, "{}")
    assert signals.taken == [signal.SIGTERM, signal.SIGINT]
    end, now = message(signals), message(signals)
    assert (end, now) == (SignalReceived(signal.SIGTERM), SignalReceived(signal.SIGINT, Request.STOP_NOW))
    signals.taken.append(signal.SIGINT)
    signals.now = False
    ask(writer, replace(OURS, now=True))
    ask(writer, "{}")
    assert len(signals.taken) == 3


def test_where_ctrl_c_is_ignored_sigterm_stands_for_it(writer: RunWriter) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals_to(queue.SimpleQueue()) as signals, stop_requests(writer, signals):
            ask(writer, replace(OURS, now=True))
            assert message(signals) == SignalReceived(signal.SIGTERM, Request.STOP_NOW)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "request_text",
    ["", "[]", "nonsense", "[" * 100_000, "\0", text(replace(OURS, pid=1)), text(replace(OURS, host="x"))],
    ids=["empty", "list", "nonsense", "deep", "nul", "another process", "another host"],
)
def test_request_for_another_driver_and_nonsense_are_removed_and_not_obeyed(
    writer: RunWriter, signals: Signals, request_text: str
) -> None:
    ask(writer, request_text)
    ask(writer, "{}")
    assert signals.taken == []


def test_request_that_the_driver_before_left_is_not_for_the_next(tmp_path: Path, writer: RunWriter) -> None:
    writer.finish(RunStatus.FAILED, 1)
    writer.close()
    writer.layout.stop_json.write_text(text(OURS))
    with RunWriter.reopen(tmp_path / "a-run", "") as again:
        assert not again.layout.stop_json.exists()


def going(writer: RunWriter, *, elsewhere: bool = False) -> StopTarget:
    def look() -> Run:
        view = Run(writer.layout.root)
        if not elsewhere:
            return view
        driver = replace(view.record.driver, host="far")
        return Run(view.root, replace(view.record, driver=driver))

    return StopTarget(writer.layout, look, look_every_s=0.01)


def test_stop_waits_until_the_run_has_ended_and_its_driver_has_left(writer: RunWriter) -> None:
    said: list[str] = []

    def tell(text: str) -> None:
        said.append(text)
        assert REQUEST.validate_json(writer.layout.stop_json.read_bytes()) == OURS
        writer.finish(RunStatus.PREEMPTED, ExitCode.PREEMPTED)
        writer.close()

    ended = stop_run(going(writer), now=False, by="me@here", tell=tell)
    assert (ended.status, ended.record.exit_code) == ("preempted", 75)
    assert said == [f"waiting up to 30.5 s for run a-run to end: process {os.getpid()} on {socket.gethostname()}"]
    assert not writer.layout.stop_json.exists()


def test_driver_that_does_not_answer_is_named(writer: RunWriter) -> None:
    with pytest.raises(ClusterError) as caught:
        stop_run(going(writer, elsewhere=True), now=False, by="", tell=lambda text: None, margin_s=0.0)
    assert str(caught.value) == (
        f"run a-run has not ended after 0.5 s (process {os.getpid()} on far has not taken the request: is it stopped, "
        "or its host down?); wait, or end it with ddptrain stop a-run --now"
    )
    assert json.loads(writer.layout.stop_json.read_text())["host"] == "far"


def test_request_that_cannot_be_written_says_what_to_do_instead(writer: RunWriter, tmp_path: Path) -> None:
    gone = replace(going(writer), desk=Run(tmp_path / "gone"))
    with pytest.raises(ResultsError, match=rf"; or send SIGINT three times to process {os.getpid()} on "):
        stop_run(gone, now=True, by="", tell=pytest.fail)


# --- Signals to the driver are messages, and interrupt only what merely waits ---


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


def test_signal_for_the_ranks_asks_for_no_end_and_interrupts_nothing() -> None:
    inbox: Inbox = queue.SimpleQueue()
    with signals_to(inbox, passes_on=True) as signals, signals.interrupting():
        os.kill(os.getpid(), signal.SIGUSR1)
        assert inbox.get(timeout=60) == SignalReceived(signal.SIGUSR1, Request.FORWARD)
        assert signals.taken == []
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
