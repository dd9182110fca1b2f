"""How a rank finds its function, how its process is set up and ended, and how it reports errors."""

from __future__ import annotations

import atexit
import faulthandler
import io
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.protocol import events
from ddptrain.rank import rank_process
from ddptrain.rank.entrypoint import load_function
from ddptrain.rank.failure import exceptions, lost_peer_errors
from ddptrain.rank.failure.tracebacks import user_traceback
from ddptrain.rank.server import process_control
from tests.unit.specs import make_spec


def test_function_is_found_by_its_module_and_name() -> None:
    assert load_function("json:dumps").__name__ == "dumps"


def test_missing_module_is_an_error_with_interpreter_and_path() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"no module 'no_such_thing' for .*python.*; it was looked for in "):
        load_function("no_such_thing.train:main")


def test_missing_function_is_an_error_with_the_existing_names() -> None:
    with pytest.raises(AttributeError, match=r"'dumbs'; it has .*dumps"):
        load_function("json:dumbs")


def test_method_of_a_class_is_found_and_a_missing_one_is_an_error() -> None:
    assert load_function("collections:Counter.fromkeys").__name__ == "fromkeys"
    with pytest.raises(AttributeError, match=r"no 'most'; it has copy, elements, most_common, .*update$"):
        load_function("collections:Counter.most")


def test_target_that_is_not_a_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"not a function"):
        load_function("sys:path")


def test_missing_import_inside_the_users_module_is_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'not_installed_here'$"):
        load_function("needs_more:main")
    sys.modules.pop("needs_more", None)


@pytest.mark.parametrize(("code", "status"), [(None, 0), (0, 0), (42, 42), (256 + 7, 7), (-1, 255), ("a message", 1)])
def test_exit_code_is_that_of_python(code: object, status: int) -> None:
    assert exceptions.exit_code(SystemExit(code)) == status


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("connection closed by peer"), False),
    ],
)
def test_error_of_a_rank_that_lost_its_peer_is_recognized(error: BaseException, lost: bool) -> None:
    assert lost_peer_errors.lost_peer(error) is lost


def test_traceback_begins_with_the_users_frame() -> None:
    def user() -> None:
        raise ValueError("boom")

    try:
        user()
    except ValueError as error:
        text = user_traceback(error)
    assert "in user" in text
    assert text.endswith("ValueError: boom\n")


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({}, ["/p", "/q", "/lib", "/other"]),
        ({"built_in": True}, ["/lib", "/other", "/p", "/q"]),
        ({"script": "train.py"}, ["/lib", "/p", "/other"]),
        ({"env": {"PYTHONPATH": ":/x"}}, ["/p", "/q", "{workdir}", "/lib", "/other"]),
        ({"env": {"PYTHONPATH": ""}}, ["/p", "/q", "/lib", "/other"]),
    ],
)
def test_modules_of_the_project_are_searched_first_and_once_but_for_built_in_workloads(
    changes: dict[str, Any], path: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # and back after the test
    monkeypatch.setattr(os, "environ", {"OF_THE_WORKER": "1"})
    monkeypatch.setattr(sys, "path", ["/lib", "/p", "/other"])
    monkeypatch.setattr(sys, "argv", ["worker"])
    workdir = tmp_path / "work"
    workdir.mkdir()
    code = {"workload": "m:f", "workdir": str(workdir), "sys_path": ("/p", "/q")}
    spec = make_spec(**{"env": {"OF_THE_RANK": "2"}, **code, **changes})
    set_up: list[str] = []
    monkeypatch.setattr(random, "seed", lambda: set_up.append("random"))
    monkeypatch.setattr(time, "tzset", lambda: set_up.append(f"time zone of {os.environ.get('OF_THE_WORKER')}"))
    monkeypatch.setattr("importlib.invalidate_caches", lambda: set_up.append("imports"))
    rank_process._enter_environment(spec)
    assert set_up == ["imports", "random", "time zone of None"]
    assert sys.path == [entry.format(workdir=workdir) for entry in path]
    assert (os.environ, sys.argv, Path.cwd()) == (spec.env, ["m:f"], workdir)


# --- the process ---


def test_spec_is_read_from_a_descriptor_that_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "spec"
    path.write_text(make_spec(rank=3).to_json())
    with path.open() as file:
        assert rank_process.read_spec(file.fileno()) == make_spec(rank=3)
        os.fstat(file.fileno())


class Rank:
    """A rank whose life is a function of the test; `done` has what happens around it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[Any] = []
        self.live: Callable[[], int] = lambda: 3
        monkeypatch.setattr(process_control, "name_process", self.note("name"))
        monkeypatch.setattr(process_control, "die_with_parent", self.note("die with parent"))
        monkeypatch.setattr(rank_process, "_redirect_output", self.note("output"))
        monkeypatch.setattr(rank_process, "_enter_environment", lambda spec: self.done.append(("enter", spec.rank)))
        monkeypatch.setattr(rank_process, "_run_exit_handlers", self.note("exit handlers"))
        monkeypatch.setattr(rank_process, "Emitter", lambda fd: SimpleNamespace(emit=self.emit, fd=fd))
        monkeypatch.setattr(rank_process, "CommandReader", lambda fd: ("commands", fd))
        monkeypatch.setattr(rank_process, "RankLifecycle", self._made)

    def note(self, name: str) -> Callable[..., None]:
        return lambda *given: self.done.append((name, *given))

    def emit(self, event: events.Event) -> None:
        assert isinstance(event, events.Note) and event.level == "info"
        self.done.append(event.message)

    def _made(self, spec: Any, emitter: Any, orders: Any) -> Any:
        self.done.append(("rank", spec.rank, emitter.fd, orders))
        return SimpleNamespace(run=self.live, tracked=SimpleNamespace(bound_exit=self.note("bound exit")))


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


COLD = (
    "ranks start cold, some seconds slower: the environment sets variables that only a fresh program reads "
    "(MALLOC_*, LD_*, PYTHON*, ...), or importing torch started threads"
)


@pytest.mark.parametrize(("number", "cold", "notes"), [(0, False, []), (1, True, []), (0, True, [COLD])])
def test_rank_runs_with_its_output_events_commands_and_environment(
    rank: Rank, number: int, cold: bool, notes: list[str]
) -> None:
    assert rank_process.run_rank(make_spec(rank=number), 11, 12, 13, cold=cold) == 3
    begin = [("name", f"ddptrain-rank{number}", f"ddptrain rank {number} of r-1"), ("output", 11), *notes]
    middle = [("enter", number), ("rank", number, 12, ("commands", 13)), ("bound exit", 3), ("exit handlers",)]
    assert rank.done == [*begin, *middle]


def test_exit_handlers_run_also_if_the_rank_is_interrupted(rank: Rank) -> None:
    def live() -> int:
        raise KeyboardInterrupt

    rank.live = live
    with pytest.raises(KeyboardInterrupt):
        rank_process.run_rank(make_spec(), 11, 12, 13)
    assert rank.done[-1] == ("exit handlers",) and ("bound exit", 3) not in rank.done


class Left(Exception):
    """The process has ended with this code."""


@pytest.mark.parametrize(("fails", "code"), [(False, 3), (True, 70)])
def test_cold_rank_ends_with_its_code_or_70(
    rank: Rank,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fails: bool,
    code: int,
) -> None:
    def leave(status: int) -> None:
        raise Left(status)

    path = tmp_path / "spec"
    path.write_text("no JSON" if fails else make_spec().to_json())
    monkeypatch.setattr(os, "_exit", leave)
    with path.open() as file:
        monkeypatch.setattr(sys, "argv", ["rank_process", str(file.fileno()), "11", "12", "13"])
        with pytest.raises(Left) as left:
            rank_process.main()
    assert left.value.args == (code,) and rank.done[0] == ("die with parent",)
    assert ("Traceback" in capsys.readouterr().err) is fails
    if not fails:
        assert rank.done[2:4] == [("output", 11), COLD] and rank.done[5] == ("rank", 0, 12, ("commands", 13))


def test_output_is_not_buffered_and_escapes_what_is_no_text(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        stream = rank_process._unbuffered(file.fileno(), "<stdout>")
        print("a\udcff", file=stream)
        assert (tmp_path / "log").read_bytes() == b"a\\udcff\n"
        assert (stream.encoding, stream.name, stream.mode) == ("utf-8", "<stdout>", "w")
        stream.close()
        os.fstat(file.fileno())


def test_output_goes_to_the_log_and_nothing_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    for name in ("stdin", "stdout", "stderr", "__stdout__", "__stderr__"):
        monkeypatch.setattr(sys, name, getattr(sys, name))  # and back after the test

    def open_null(*given: Any) -> int:
        done.append(("open", *given))
        return 9

    monkeypatch.setattr(os, "open", open_null)
    monkeypatch.setattr(os, "close", lambda fd: done.append(("close", fd)))
    monkeypatch.setattr(os, "dup2", lambda *given, **more: done.append(("dup2", *given, more)))
    monkeypatch.setattr(faulthandler, "enable", lambda **more: done.append(("faults", more)))
    monkeypatch.setattr(rank_process, "_unbuffered", lambda *given: ("stream", *given))
    monkeypatch.setattr("builtins.open", lambda fd, **more: ("opened", fd, more))
    rank_process._redirect_output(7)
    streams = (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    monkeypatch.undo()
    assert done == [
        ("open", os.devnull, os.O_RDONLY),
        ("dup2", 9, 0, {}),
        ("close", 9),
        ("dup2", 7, 1, {"inheritable": True}),
        ("dup2", 7, 2, {"inheritable": True}),
        ("faults", {"file": 2}),
    ]
    out, err = ("stream", 1, "<stdout>"), ("stream", 2, "<stderr>")
    assert streams == (("opened", 0, {"closefd": False}), out, err, out, err)  # type: ignore[comparison-overlap]


def test_files_that_the_users_code_has_left_open_are_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, binary = (tmp_path / "text").open("w"), (tmp_path / "binary").open("wb")
    closed = (tmp_path / "closed").open("w")
    closed.close()
    monkeypatch.setattr(threading, "_shutdown", lambda: text.write("a"))
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: binary.write(b"b"))
    with text, binary:
        rank_process._run_exit_handlers()
        assert ((tmp_path / "text").read_text(), (tmp_path / "binary").read_bytes()) == ("a", b"b")


@pytest.mark.parametrize("fails", [False, True])
def test_exit_handlers_wait_for_threads_and_output_is_flushed_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    done: list[str] = []

    class Stream(io.StringIO):
        def flush(self) -> None:
            done.append("flushed")
            raise ValueError("I/O operation on closed file")

    def run_handlers() -> None:
        done.append("handlers")
        if fails:
            raise SystemExit(3)

    monkeypatch.setattr(threading, "_shutdown", lambda: done.append("threads"))
    monkeypatch.setattr(atexit, "_run_exitfuncs", run_handlers)
    out, err = Stream(), Stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    rank_process._run_exit_handlers()
    assert done[:2] == ["threads", "handlers"] and done[-2:] == ["flushed", "flushed"]
    assert ("SystemExit: 3" in err.getvalue()) is fails
