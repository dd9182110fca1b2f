"""A rank is forked only if a fork is equivalent to a fresh process."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any

import pytest

from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.rank import rank_process
from ddptrain.rank.server import children, process_control
from tests.unit.specs import make_spec

FORKED, COLD = 1, 2


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The descriptors that forked children close; no process is started."""
    closed: list[set[int]] = []

    def fork(main: Callable[[], int], close: set[int]) -> int:
        closed.append(close)
        return FORKED

    monkeypatch.setattr(children, "_fork", fork)
    monkeypatch.setattr(children, "_start_cold", lambda env, fds: COLD)
    return closed


@pytest.fixture
def spec_file() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        yield file


def start(file: IO[bytes], *, why_cold: str = "", **env: str) -> tuple[int, str]:
    spec = make_spec(env={**os.environ, **env})
    file.seek(0)
    file.truncate()
    file.write(spec.to_json().encode())
    file.flush()
    return children.start_rank(file.fileno(), 101, 102, 103, why_cold=why_cold, close=[101, 200, 201])


def test_rank_is_forked_from_a_warm_server(started: list[set[int]], spec_file: IO[bytes]) -> None:
    assert start(spec_file, TOKEN="x") == (FORKED, "forked")
    assert started == [{200, 201, spec_file.fileno()}], "its own descriptors stay open"


@pytest.mark.parametrize("variable", ["LD_PRELOAD", "MALLOC_ARENA_MAX", "PYTHONHASHSEED"])
def test_variable_that_only_a_fresh_process_reads_needs_a_cold_start(
    started: list[set[int]], spec_file: IO[bytes], variable: str
) -> None:
    assert start(spec_file, **{variable: "7"}) == (COLD, f"cold: only a fresh program reads {variable}")
    assert started == []


def test_server_with_threads_starts_ranks_cold(started: list[set[int]], spec_file: IO[bytes]) -> None:
    why = "the rank server has 2 threads"
    assert start(spec_file, why_cold=why) == (COLD, f"cold: {why}")
    assert started == []


def test_forked_rank_runs_with_its_spec_and_descriptors(monkeypatch: pytest.MonkeyPatch, spec_file: IO[bytes]) -> None:
    ran: list[tuple[Any, ...]] = []

    def run_rank(spec: RankSpec, *fds: int) -> int:
        ran.append((spec.env["TOKEN"], *fds))
        return 42

    monkeypatch.setattr(rank_process, "run_rank", run_rank)
    monkeypatch.setattr(children, "_fork", lambda main, close: main())
    assert start(spec_file, TOKEN="x") == (42, "forked")
    assert ran == [("x", 101, 102, 103)]


def test_cold_start_is_a_fresh_interpreter_that_cannot_import_from_the_working_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[list[str], dict[str, Any]]] = []
    made: list[Any] = []

    class Process:
        pid = 7
        returncode = None

        def __init__(self, command: list[str], **options: Any) -> None:
            started.append((command, options))
            made.append(self)

    monkeypatch.setattr(subprocess, "Popen", Process)
    assert children._start_cold({"A": "1"}, (3, 4, 5, 6)) == 7
    ((command, options),) = started
    assert command == [sys.executable, "-P", "-m", "ddptrain.rank.rank_process", "3", "4", "5", "6"]
    streams = {"stdin": subprocess.DEVNULL, "stdout": 4, "stderr": 4}
    assert options == {"env": {"A": "1"}, **streams, "pass_fds": (3, 4, 5, 6), "process_group": 0}
    assert made[0].returncode == 0, "Popen must not wait for a process that the server reaps"


def test_cold_start_reads_the_spec_from_its_beginning(started: list[set[int]], spec_file: IO[bytes]) -> None:
    start(spec_file, why_cold="it still imports")
    assert os.lseek(spec_file.fileno(), 0, os.SEEK_CUR) == 0


# --- forks ---


class Left(Exception):
    """The forked child has ended with this code."""


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What a child does to its process; nothing really happens."""
    done: list[tuple[Any, ...]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *given: done.append((name, *given))

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "setpgid", note("group"))
    monkeypatch.setattr(os, "close", note("close"))
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(signal, "set_wakeup_fd", note("wake-up"))
    monkeypatch.setattr(signal, "signal", note("signal"))
    monkeypatch.setattr(gc, "enable", note("gc"))
    monkeypatch.setattr(process_control, "die_with_parent", note("die with parent"))
    return done


def test_parent_of_a_fork_makes_its_group_too(monkeypatch: pytest.MonkeyPatch, process: list[tuple[Any, ...]]) -> None:
    monkeypatch.setattr(os, "fork", lambda: 4711)
    assert children._fork(lambda: 0, {5}) == 4711
    assert process == [("group", 4711, 4711)]

    def gone(*_: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "setpgid", gone)
    assert children._fork(lambda: 0, {5}) == 4711


def test_child_of_a_fork_has_no_handlers_and_descriptors_of_the_server(
    monkeypatch: pytest.MonkeyPatch, process: list[tuple[Any, ...]]
) -> None:
    def main() -> int:
        process.append(("main",))
        return 3

    monkeypatch.setattr(os, "fork", lambda: 0)
    with pytest.raises(Left) as left:
        children._fork(main, {5})
    assert left.value.args == (3,)
    handlers: list[Any] = [("signal", number, signal.SIG_DFL) for number in (signal.SIGCHLD, signal.SIGTERM)]
    handlers.append(("signal", signal.SIGINT, signal.default_int_handler))  # as in every Python program
    begin = [("group", 0, 0), ("die with parent",), ("wake-up", -1), ("gc",)]
    assert process == [*begin, *handlers, ("close", 5), ("main",)]


def test_child_that_fails_ends_with_70_and_a_traceback(
    capsys: pytest.CaptureFixture[str], process: list[tuple[Any, ...]]
) -> None:
    def main() -> int:
        raise KeyboardInterrupt("now")

    with pytest.raises(Left) as left:
        children._become_child(main, set())
    assert left.value.args == (70,)
    assert capsys.readouterr().err.endswith("KeyboardInterrupt: now\n")


def test_store_is_forked_and_listens_until_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def fork(main: Callable[[], int], close: set[int]) -> int:
        done.append(close)
        return main()

    monkeypatch.setattr(children, "_fork", fork)
    monkeypatch.setattr(os, "dup", lambda fd: fd + 1000)
    monkeypatch.setattr(signal, "pause", lambda: done.append("paused"))
    monkeypatch.setattr(process_control, "name_process", lambda *given: done.append(given))
    monkeypatch.setattr("torch.distributed.TCPStore", lambda *given, **more: done.append((given, more)))
    assert children.start_store("10.0.0.1", 4000, 9, close=[8, 9, 10]) == 0
    options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": 1009}
    name = ("ddptrain-store", "ddptrain store of a worker group")
    assert done == [{8, 10}, name, (("10.0.0.1", 4000), options), "paused"]
