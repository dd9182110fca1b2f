"""A rank reports the stacks of its threads, and exceptions that end a thread."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.protocol import events
from ddptrain.protocol.rank_spec import STACKS_DUMP, STACKS_SIGNAL
from ddptrain.rank.collective.calls import CollectiveCalls
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.failure import stacks as rank_stacks
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


@pytest.fixture
def reporter(tmp_path: Path, emitter: Emitter, monkeypatch: pytest.MonkeyPatch) -> StackReporter:
    """A reporter that registers no signal."""
    monkeypatch.setattr(faulthandler, "register", lambda *given, **options: None)
    spec = make_spec(rank=3, attempt=2, staging=str(tmp_path))
    return StackReporter(spec, emitter, CollectiveCalls(make_spec(world_size=1), emitter))


def test_stacks_of_compiled_code_go_to_a_private_file_on_a_signal(
    tmp_path: Path, emitter: Emitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(faulthandler, "register", lambda *given, **options: registered.append((*given, options)))
    spec = make_spec(staging=str(tmp_path))
    StackReporter(spec, emitter, CollectiveCalls(spec, emitter))
    ((number, options),) = registered
    dump = tmp_path / STACKS_DUMP
    assert number == STACKS_SIGNAL and options["all_threads"] is True
    assert os.path.samestat(os.fstat(options["file"]), dump.stat()) and dump.stat().st_mode & 0o777 == 0o600
    os.close(options["file"])


def test_call_in_which_the_rank_waits_is_in_the_event(tmp_path: Path, reporter: StackReporter) -> None:
    reporter._collective_calls.enter("checkpoint")
    with reporter._collective_calls.waiting("checkpoint", 40):
        reporter.report()
    reporter.report()
    told = [event for event in events_of(tmp_path / "events") if isinstance(event, events.Stacks)]
    assert [(event.waits, event.waits_step) for event in told] == [("checkpoint", 40), ("", None)]
    assert [event.calls for event in told] == [{"checkpoint": 1}] * 2 and told[0].handles == ""
    files = [event for event in events_of(tmp_path / "events") if isinstance(event, events.FileSaved)]
    assert [file.staging for file in files] == ["stacks-0", "stacks-1"]
    text = (tmp_path / "stacks-0").read_text()
    assert text.startswith(f"rank 3, attempt 2, pid {os.getpid()}, 20") and " UTC\n\nMainThread (most" in text


def test_thread_of_compiled_code_has_no_name() -> None:
    frame = sys._getframe()
    text = rank_stacks._text(make_spec(), {-1: frame, threading.main_thread().ident or 0: frame})
    assert text.index("\nMainThread (most recent") < text.index("\na thread that Python did not start (most recent")


def test_full_disk_does_not_end_the_thread_that_reports(reporter: StackReporter) -> None:
    def emit(event: events.Event) -> None:
        raise OSError(28, "No space left on device")

    reporter._emitter = SimpleNamespace(emit=emit)  # type: ignore[assignment]
    reporter.report()


def test_deep_stack_has_its_200_innermost_frames() -> None:
    def frames(depth: int) -> tuple[str, ...]:
        return frames(depth - 1) if depth else rank_stacks._innermost_first(sys._getframe())

    found = frames(250)
    assert len(found) == 200 and all(frame.endswith(" frames") for frame in found)
    assert rank_stacks._innermost_first(None) == ()
    line = frames.__code__.co_firstlineno + 1
    assert found[0] == f"{__file__}:{line} frames"


def group(number: Any) -> Any:
    return SimpleNamespace(_get_sequence_number_for_group=number)


def failing() -> int:
    raise RuntimeError("not implemented")


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (None, None),
        (SimpleNamespace(is_initialized=lambda: False), None),
        (SimpleNamespace(is_initialized=lambda: True, _get_default_group=lambda: group(lambda: 17)), 17),
        (SimpleNamespace(is_initialized=lambda: True, _get_default_group=lambda: group(failing)), None),
    ],
)
def test_number_of_collective_operations_is_that_of_the_default_group(
    monkeypatch: pytest.MonkeyPatch, module: Any, expected: int | None
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", module)
    assert rank_stacks._sequence() == expected


@pytest.mark.parametrize(("error", "reported"), [(ValueError("x" * 4_001), 1), (SystemExit(3), 0), (None, 0)])
def test_end_of_a_thread_is_printed_and_reported_unless_it_is_an_exit(
    tmp_path: Path, emitter: Emitter, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, reported: int
) -> None:
    printed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    report_thread_failures(emitter)
    ended: Any = SimpleNamespace(exc_value=error, thread=None)
    threading.excepthook(ended)
    assert printed == [ended]
    told = events_of(tmp_path / "events")
    assert len(told) == reported
    if reported:
        assert isinstance(told[0], events.ThreadFailure) and (told[0].thread, told[0].type) == ("", "ValueError")
        assert "\n... [1 characters] ...\n" in told[0].message and told[0].traceback.startswith("ValueError: xxx")
