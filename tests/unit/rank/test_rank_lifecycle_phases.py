"""The phases of a rank with stand-ins for torch's process group, the user's code, the context and the trackers."""

from __future__ import annotations

import datetime as dt
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dask_pytorch_ddp import dispatch
from torch import distributed
from torch.distributed import distributed_c10d as c10d

from ddptrain.protocol import events
from ddptrain.protocol.commands import CommandReader
from ddptrain.rank import current_context, rank_lifecycle
from ddptrain.rank.checkpoint.coordination import PreemptedExit
from ddptrain.rank.data import dataloader_workers
from ddptrain.rank.emitter import Emitter
from ddptrain.rank.rank_lifecycle import RankLifecycle
from tests.unit.specs import make_spec

CPU = torch.device("cpu")


class Trackers:
    """The trackers of a rank: notes the calls; `error` is that of finish()."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error = ""

    def begin(self) -> None:
        self.calls.append(("begin",))

    def hurry(self, grace_s: float) -> None:
        self.calls.append(("hurry", grace_s))

    def end(self, state: str) -> None:
        self.calls.append(("end", state))

    def finish(self, state: str) -> str:
        self.calls.append(("finish", state))
        return self.error


class Context:
    """The context of a rank: notes how it was closed; `fails` is raised by close()."""

    def __init__(self) -> None:
        self.closed: list[tuple[Any, ...]] = []
        self.fails: list[BaseException] = []

    def close(self, *arguments: Any, **options: Any) -> None:
        self.closed.append((*arguments, options))
        if self.fails:
            raise self.fails.pop(0)


class Bench:
    """A rank that calls `code` of the test in place of the user's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **spec: Any) -> None:
        self.path = folder / "events"
        self.fds = [os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), *os.pipe()]
        self.rank = RankLifecycle(make_spec(**spec), Emitter(self.fds[0]), CommandReader(self.fds[1]))
        self.trackers, self.joined = Trackers(), list[Any]()
        self.rank.tracked = self.trackers  # type: ignore[assignment]
        self.code: Callable[[], object] = lambda: None
        self.leaves: Callable[[], None] = lambda: None  # what happens while the process group is shut down
        monkeypatch.setattr(self.rank, "_handle_commands", lambda: None)
        monkeypatch.setattr(self.rank, "_set_up_torch", lambda: CPU)
        monkeypatch.setattr(self.rank, "_measure_steps", lambda: None)
        monkeypatch.setattr(rank_lifecycle, "report_thread_failures", lambda emitter: None)
        monkeypatch.setattr(current_context, "provide", lambda get: None)
        monkeypatch.setattr(rank_lifecycle, "load_function", lambda name: name)
        monkeypatch.setattr(rank_lifecycle, "bind", lambda name, params: lambda context: self.code())
        monkeypatch.setattr("ddptrain.rank.script.run", lambda spec, begin: (begin(), self.code()))
        monkeypatch.setattr(self.rank, "_wait_for_all_ranks", lambda: self.joined.append("all"))
        monkeypatch.setattr(rank_lifecycle, "note_unused", lambda spec, emitter: None)
        monkeypatch.setattr("ddptrain.rank.context.RankContext", lambda *parts: Context())

        def dispatch_with_ddp(call: Any, *arguments: Any, backend: str) -> None:
            *place, function, device = arguments
            self.joined.append((*place, backend))
            call(function, device)
            self.leaves()

        monkeypatch.setattr(dispatch, "dispatch_with_ddp", dispatch_with_ddp)

    def events(self) -> list[events.Event]:
        return [events.decode(line) for line in self.path.read_bytes().splitlines()]

    def names(self) -> list[str]:
        return [type(event).__name__ for event in self.events()]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def bench(**spec: Any) -> Bench:
        made.append(Bench(tmp_path, monkeypatch, **spec))
        return made[-1]

    yield bench
    for each in made:
        for fd in each.fds:
            os.close(fd)


def raising(error: BaseException) -> Callable[[], None]:
    def code() -> None:
        raise error

    return code


def test_function_is_called_in_the_process_group_and_its_result_is_reported(make: Callable[..., Bench]) -> None:
    bench = make(rank=0, environment={"worker": {"A": "1"}})
    bench.code = lambda: 3
    assert bench.rank.run() == 0
    assert bench.joined == [("10.0.0.1", 1234, 0, 4, "gloo"), "all"]
    started, entered, returned, finished = bench.events()
    assert isinstance(started, events.Started) and isinstance(entered, events.Entered)
    assert (started.pid, started.host, started.device) == (os.getpid(), socket.gethostname(), "cpu")
    assert (started.environment, started.versions["torch"]) == ({"worker": {"A": "1"}}, str(torch.__version__))
    assert started.versions["python"] == sys.version.split()[0]
    assert isinstance(returned, events.Returned) and returned.value == "3" and isinstance(finished, events.Finished)
    assert bench.trackers.calls == [("begin",), ("finish", "finished")] and bench.rank.phase == "train"


def test_script_joins_no_group_and_names_its_gpu(make: Callable[..., Bench]) -> None:
    bench = make(script="s.py", gpu="3")
    bench.rank._set_up_torch = lambda: torch.device("cuda", 1)  # type: ignore[method-assign]
    assert bench.rank.run() == 0 and bench.joined == []
    assert bench.names() == ["Started", "Entered", "Finished"]
    (started, *_) = bench.events()
    assert isinstance(started, events.Started) and started.device == "3"
    assert bench.trackers.calls == [("begin",), ("finish", "finished")]


def test_there_is_one_context(make: Callable[..., Bench]) -> None:
    rank = make().rank
    assert rank._get_context(CPU) is rank._get_context(CPU)


@pytest.mark.parametrize(
    ("error", "code", "state", "phases"),
    [
        (ValueError("no"), 1, "failed", ["train"]),
        (SystemExit(3), 3, "failed", ["train"]),
        (SystemExit("text"), 1, "failed", ["train"]),
        (SystemExit(0), 0, "finished", []),
        (SystemExit(75), 75, "failed", ["train"]),
        (PreemptedExit(), 75, "preempted", []),
        (KeyboardInterrupt(), 1, "failed", ["train"]),
    ],
)
def test_end_of_the_code_is_the_exit_code_and_reported_once(
    make: Callable[..., Bench],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    state: str,
    phases: list[str],
) -> None:
    bench = make()
    bench.code = raising(error)
    assert bench.rank.run() == code
    assert [event.phase for event in bench.events() if isinstance(event, events.Failure)] == phases
    assert bench.trackers.calls[-1] == ("finish", state)
    # Trackers of a failed rank finish at once, for the rank is about to be stopped.
    assert bench.trackers.calls[1:-1] == ([("hurry", 1.0), ("end", "failed")] if phases else [])
    if error.args == ("text",):
        assert "text\n" in capsys.readouterr().err


def test_failure_completes_the_save_that_is_being_written(make: Callable[..., Bench]) -> None:
    for error in (ValueError("no"), SystemExit(3)):
        bench = make()
        bench.code = raising(error)
        bench.rank.run()
        context: Any = bench.rank.context
        assert context.closed == [(1.0, {"failed": True})]


def test_error_while_it_is_completed_does_not_replace_the_failure(make: Callable[..., Bench]) -> None:
    bench = make()
    context: Any = bench.rank._get_context(CPU)
    context.fails = [OSError("full")]
    bench.code = raising(ValueError("no"))
    assert bench.rank.run() == 1
    (failure,) = [event for event in bench.events() if isinstance(event, events.Failure)]
    assert failure.type == "ValueError"


@pytest.mark.parametrize("code", [lambda: None, raising(SystemExit(0))])
def test_checkpoint_that_cant_be_written_at_the_end_fails_the_rank(
    make: Callable[..., Bench], code: Callable[[], None]
) -> None:
    bench = make()
    context: Any = bench.rank._get_context(CPU)
    context.fails = [OSError("full")]
    bench.code = code
    assert bench.rank.run() == 1 and bench.rank._state() == "failed"
    assert [event.type for event in bench.events() if isinstance(event, events.Failure)] == ["OSError"]


@pytest.mark.parametrize(
    ("phase_error", "expected"),
    [(None, ("OSError", "rendezvous")), (RuntimeError("no route"), ("RuntimeError", "rendezvous"))],
)
def test_error_of_the_rendezvous_is_the_first_one(
    make: Callable[..., Bench],
    monkeypatch: pytest.MonkeyPatch,
    phase_error: BaseException | None,
    expected: tuple[str, str],
) -> None:
    def dispatch_with_ddp(*arguments: Any, backend: str) -> None:
        try:
            if phase_error is not None:
                raise phase_error
        finally:
            raise OSError("the group was never made")

    bench = make()
    monkeypatch.setattr(dispatch, "dispatch_with_ddp", dispatch_with_ddp)
    assert bench.rank.run() == 1
    _, failure = bench.events()
    assert isinstance(failure, events.Failure) and (failure.type, failure.phase) == expected


def test_error_before_the_group_is_one_of_the_setup(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    monkeypatch.setattr(rank_lifecycle, "load_function", lambda name: raising(ImportError("no m"))())
    assert bench.rank.run() == 1
    _, failure = bench.events()
    assert isinstance(failure, events.Failure) and (failure.type, failure.phase) == ("ImportError", "setup")
    assert bench.trackers.calls == [("finish", "failed")]


def test_error_after_the_code_has_returned_changes_nothing(
    make: Callable[..., Bench], capsys: pytest.CaptureFixture[str]
) -> None:
    bench = make()
    bench.leaves = raising(RuntimeError("peer is gone"))
    assert bench.rank.run() == 0 and bench.names() == ["Started", "Entered", "Finished"]
    assert capsys.readouterr().err == "ddptrain: after the workload had returned: RuntimeError('peer is gone')\n"
    bench = make()
    bench.leaves = raising(SystemExit(3))
    assert bench.rank.run() == 3 and bench.rank._state() == "finished"


@pytest.mark.parametrize(("error", "code"), [("", 0), ("tracker w failed", 1)])
def test_strict_tracker_that_fails_is_the_exit_code(make: Callable[..., Bench], error: str, code: int) -> None:
    bench = make()
    bench.trackers.error = error
    assert bench.rank.run() == code


def test_waits_are_written_before_the_trackers_finish(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.rank.waiting = SimpleNamespace(flush=lambda: bench.trackers.calls.append(("flush",)))  # type: ignore[assignment]
    bench.rank.run()
    assert bench.trackers.calls == [("begin",), ("flush",), ("finish", "finished")]


# --- the run was asked to end ---


@pytest.mark.parametrize("saved", [True, False])
def test_code_that_returns_early_is_preempted_if_it_has_saved(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    died: list[bool] = []
    monkeypatch.setattr("ddptrain.rank.process_control.die_of_sigterm", lambda: died.append(True))
    bench = make()
    bench.rank.calls = SimpleNamespace(ends_early=True, has_saved=saved, notified=True)  # type: ignore[assignment]
    bench.code = lambda: 3  # no result
    code = bench.rank.run()
    if saved:
        assert (code, bench.names(), died) == (75, ["Started", "Entered", "Preempted"], [])
        assert bench.trackers.calls[-1] == ("finish", "preempted")
    else:
        assert bench.names()[:3] == ["Started", "Entered", "Note"] and died == [True]
        note = bench.events()[2]
        assert isinstance(note, events.Note) and note.level == "warning"
        assert note.message.endswith("if it has saved its state itself, raise SystemExit(75)")
        assert ("finish", "preempted") in bench.trackers.calls


# --- what is set up ---


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is changed in this process; nothing really is."""
    changed: list[Any] = []
    monkeypatch.setattr(dataloader_workers, "protect", lambda: changed.append("protected"))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: changed.append(("threads", count)))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: changed.append(("device", device)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(c10d, name, None)
    return changed


@pytest.mark.parametrize(
    ("spec", "device", "timeout_s"),
    [
        ({}, CPU, 60.0),
        ({"gpu": "GPU-1"}, torch.device("cuda", 0), 60.0),  # it sees its own GPU alone
        ({"gpu": "GPU-1", "script": "s.py", "local_rank": 1}, torch.device("cuda", 1), None),
        ({"script": "s.py"}, CPU, None),
    ],
)
def test_device_and_time_limit_are_set_for_functions(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    process: list[Any],
    spec: dict[str, Any],
    device: torch.device,
    timeout_s: float | None,
) -> None:
    rank = RankLifecycle(make_spec(cpu_threads=3, **spec), None, None)  # type: ignore[arg-type]
    assert rank._set_up_torch() == device
    assert process[:2] == ["protected", ("threads", 3)]
    assert process[2:] == ([("device", device)] if timeout_s and device.type == "cuda" else [])
    limit = dt.timedelta(seconds=timeout_s) if timeout_s else None
    assert [vars(c10d)[name] for name in ("default_pg_timeout", "default_pg_nccl_timeout")] == [limit, limit]


def test_gpu_that_torch_does_not_see_is_told(monkeypatch: pytest.MonkeyPatch, process: list[Any]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rank = RankLifecycle(make_spec(gpu="GPU-1"), None, None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="this rank was given GPU GPU-1, but torch sees none: check the driver"):
        rank._set_up_torch()


@pytest.mark.parametrize(("backend", "barriers"), [("gloo", 1), ("nccl", 0)])
def test_ranks_wait_for_each_other_where_the_backend_connects_at_once(
    monkeypatch: pytest.MonkeyPatch, backend: str, barriers: int
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(distributed, "barrier", lambda: calls.append(True))
    rank = RankLifecycle(make_spec(backend=backend), None, None)  # type: ignore[arg-type]
    rank._wait_for_all_ranks()
    assert len(calls) == barriers
