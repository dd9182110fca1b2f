"""A rank reports the stacks of its threads, and exceptions that end a thread."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import threading
from pathlib import Path

import pytest

from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import STACKS_SIGNAL
from ddptrain.rank.collective.calls import CollectiveCalls
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.failure.stacks import StackReporter, report_thread_failures
from tests.unit.specs import make_spec


def events_of(path: Path) -> list[events.Event]:
    return [events.decode(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def emitter(tmp_path: Path) -> Emitter:
    return Emitter(os.open(tmp_path / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND))


def test_stacks_of_all_threads_are_a_file_and_those_of_the_main_one_an_event(tmp_path: Path, emitter: Emitter) -> None:
    spec = make_spec(rank=3, staging=str(tmp_path))
    stacks = StackReporter(spec, emitter, CollectiveCalls(spec, emitter))
    try:
        asking = threading.Thread(target=stacks.report, name="asking")
        asking.start()
        asking.join()
    finally:
        faulthandler.unregister(STACKS_SIGNAL)
    told, file = events_of(tmp_path / "events")
    assert isinstance(told, events.Stacks)
    assert any(
        frame.endswith(" test_stacks_of_all_threads_are_a_file_and_those_of_the_main_one_an_event")
        for frame in told.main
    )
    assert (told.sequence, told.state) == (None, "")
    assert isinstance(file, events.FileSaved)
    data = (tmp_path / file.staging).read_bytes()
    assert (file.path, file.size_bytes) == ("stacks/rank-3.txt", len(data))
    assert file.sha256 == hashlib.sha256(data).hexdigest()
    text = data.decode()
    assert text.index("MainThread") < text.index("asking (most recent call last)")


def test_exception_that_the_main_thread_handles_is_in_the_event(tmp_path: Path, emitter: Emitter) -> None:
    spec = make_spec(rank=3, staging=str(tmp_path))
    stacks = StackReporter(spec, emitter, CollectiveCalls(spec, emitter))
    try:
        raise ValueError("sample 4711\nhas no label")
    except ValueError:
        asking = threading.Thread(target=stacks.report)
        asking.start()
        asking.join()
    finally:
        faulthandler.unregister(STACKS_SIGNAL)
    told = events_of(tmp_path / "events")[0]
    assert isinstance(told, events.Stacks)
    assert told.handles == "ValueError: sample 4711"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_exception_that_ends_a_thread_is_reported(
    tmp_path: Path, emitter: Emitter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    report_thread_failures(emitter)
    thread = threading.Thread(target=lambda: int("x"), name="reader")
    thread.start()
    thread.join()
    (told,) = events_of(tmp_path / "events")
    assert isinstance(told, events.ThreadFailure)
    assert (told.thread, told.type) == ("reader", "ValueError")
    assert "invalid literal" in told.message
    assert "in <lambda>" in told.traceback
    assert "invalid literal" in capsys.readouterr().err
