"""Which events a rank emits for the end of the user's code."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import pytest

from ddptrain.protocol import events
from ddptrain.protocol.commands import CommandReader
from ddptrain.protocol.rank_spec import ERROR_FILE
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.rank_lifecycle import RankLifecycle
from tests.unit.specs import make_spec


class Bench:
    """A rank whose user code is a function of the test."""

    def __init__(self, folder: Path, **spec: Any) -> None:
        self.path = folder / "events"
        self._fds = [os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), *os.pipe()]
        self.rank = RankLifecycle(
            make_spec(staging=str(folder), **spec), Emitter(self._fds[0]), CommandReader(self._fds[1])
        )

    def run(self, code: Callable[[], object]) -> list[events.Event]:
        """The events after the begin of the user's code."""
        try:
            self.rank._run_user_code(cast(Any, code))
        except BaseException as error:
            self.error: BaseException = error
        entered, *rest = [events.decode(line) for line in self.path.read_bytes().splitlines()]
        assert isinstance(entered, events.Entered)
        return rest

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def bench(**spec: Any) -> Bench:
        made.append(Bench(tmp_path, **spec))
        return made[-1]

    yield bench
    for each in made:
        each.close()


def leave(code: object) -> Callable[[], None]:
    def code_of_the_user() -> None:
        raise SystemExit(code)

    return code_of_the_user


@pytest.mark.parametrize("code", [lambda: None, leave(0), leave(None)])
def test_return_and_exit_code_0_are_a_success(make: Callable[..., Bench], code: Callable[[], None]) -> None:
    bench = make()
    assert [type(event) for event in bench.run(code)] == [events.Finished]
    assert bench.rank._state() == "finished"


def test_exception_is_a_failure_with_its_phase(make: Callable[..., Bench]) -> None:
    bench = make()
    (event,) = bench.run(lambda: int("x"))
    assert isinstance(event, events.Failure)
    assert (event.type, event.phase, event.exit_code) == ("ValueError", "train", None)
    assert bench.rank._state() == "failed"


@pytest.mark.parametrize("groups", [0, 2])
def test_exception_hook_of_the_user_prints_the_exception(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], groups: int
) -> None:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(trace)]
        print(f"{kind.__name__} {error} {names} {len(bench.path.read_bytes().splitlines())}")

    bench = make()
    monkeypatch.setattr(sys, "excepthook", hook)
    for _ in range(groups):
        monkeypatch.setattr(sys, "excepthook", hook_of_torch(sys.excepthook))
    bench.run(fail)
    assert tuple(capsys.readouterr()) == ("ValueError boom ['fail'] 2\n", "")  # the failure is already reported


@pytest.mark.parametrize("groups", [0, 2])
def test_exception_is_printed_without_a_hook_of_the_user(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], groups: int
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for _ in range(groups):
        monkeypatch.setattr(sys, "excepthook", hook_of_torch(sys.excepthook))
    make().run(fail)
    assert capsys.readouterr().err.count("ValueError: boom") == 1


def test_exception_hook_that_fails_costs_no_traceback(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda: None)
    assert [type(event) for event in make().run(fail)] == [events.Failure]
    printed = capsys.readouterr().err
    assert "takes 0 positional arguments but 3 were given" in printed and "ValueError: boom" in printed


def fail() -> None:
    raise ValueError("boom")


def hook_of_torch(old_hook: Callable[..., object]) -> Callable[..., object]:
    """The hook that init_process_group sets."""

    def hook(*error: object) -> None:
        print("[rank0]: ", end="", file=sys.stderr)
        old_hook(*error)

    hook.__module__ = "torch.distributed.distributed_c10d"
    return hook


@pytest.mark.parametrize(
    ("spec", "notified", "expected"),
    [({}, False, "failed"), ({}, True, "preempted"), ({"script": "s.py"}, False, "preempted")],
)
def test_exit_code_75_is_a_preemption_of_a_script_or_after_the_notice(
    make: Callable[..., Bench], spec: dict[str, Any], notified: bool, expected: str
) -> None:
    bench = make(**spec)
    bench.rank.calls.notified = notified
    (event,) = bench.run(leave(75))
    assert bench.rank._state() == expected
    if expected == "failed":
        assert isinstance(event, events.Failure) and event.exit_code == 75
    else:
        assert isinstance(event, events.Preempted) and event.step == 0


def test_error_file_of_a_script_is_its_failure(make: Callable[..., Bench], tmp_path: Path) -> None:
    bench = make(script="s.py")
    (tmp_path / ERROR_FILE).write_text('{"message": {"message": "KeyError: from record", "extraInfo": {}}}')
    (event,) = bench.run(leave(3))
    assert isinstance(event, events.Failure)
    assert (event.type, event.message, event.exit_code) == ("KeyError", "from record", 3)


def test_return_value_of_rank_0_is_reported_if_it_is_json(make: Callable[..., Bench]) -> None:
    bench = make()
    (returned, finished) = bench.run(lambda: bench.rank._report_result({"accuracy": 0.5}))
    assert isinstance(returned, events.Returned) and returned.value == '{"accuracy": 0.5}'
    assert isinstance(finished, events.Finished)


def test_other_return_values_get_a_warning(make: Callable[..., Bench]) -> None:
    bench = make()
    note, _ = bench.run(lambda: bench.rank._report_result(object()))
    assert isinstance(note, events.Note) and note.level == "warning"
    assert note.message.startswith("the workload's return value (object) is not stored:")


def test_return_values_of_other_ranks_are_ignored(make: Callable[..., Bench]) -> None:
    bench = make(rank=1)
    assert [type(event) for event in bench.run(lambda: bench.rank._report_result(1))] == [events.Finished]


def test_a_rank_that_is_told_to_stop_in_its_clean_up_reports_why_it_cleans_up(
    make: Callable[..., Bench], capfd: pytest.CaptureFixture[str]
) -> None:
    bench = make()

    def fails() -> None:
        try:
            raise ValueError("sample 4711")
        finally:
            bench.rank._report_handled()

    handled, left = bench.run(fails)
    assert isinstance(handled, events.Failure)
    assert (handled.message, handled.handled) == ("sample 4711", True)
    assert isinstance(left, events.Failure)
    assert (left.message, left.handled) == ("sample 4711", False)
    assert "while it handled an exception:\nTraceback" in capfd.readouterr().err
    bench.rank._report_handled()  # it has failed: there is nothing to add
    assert len(bench.path.read_bytes().splitlines()) == 3


class Ended(BaseException):
    """In place of the end of the process."""


@pytest.mark.parametrize(("error", "code"), [(None, 0), (SystemExit(), 0), (SystemExit(3), 3), (ValueError("bad"), 1)])
def test_child_that_the_code_has_forked_ends_without_touching_the_rank(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, error: BaseException | None, code: int
) -> None:
    def end(status: int) -> None:
        raise Ended(status)

    def code_of_the_user() -> None:
        monkeypatch.setattr(os, "getpid", lambda: -1)
        if error is not None:
            raise error

    monkeypatch.setattr(os, "_exit", end)
    bench = make()
    monkeypatch.setattr(bench.rank, "_complete_saves", lambda: None)
    assert bench.run(code_of_the_user) == []
    assert isinstance(bench.error, Ended) and bench.error.args == (code,)


@pytest.mark.parametrize("error", [ValueError("sample 4711"), SystemExit("no file")])
def test_failure_is_reported_if_the_code_has_closed_stderr(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    (event,) = make().run(fail)
    assert isinstance(event, events.Failure) and event.type == type(error).__name__
