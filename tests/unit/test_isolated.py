"""A function in a process of its own: answers, errors, a deadline, and an end with the parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddptrain.errors import ClusterError, UsageError
from ddptrain.isolated import Isolated

ENVIRON = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
HERE = "tests.unit.test_isolated"


def answer(request: Any, send: Callable[[Any], None]) -> None:
    print("output of a library")
    for item in request:
        send([item, os.getpid()])


def fail(request: str, send: Callable[[Any], None]) -> None:
    send("first")
    if request == "die":
        os.abort()
    raise {"usage": UsageError, "bug": KeyError}[request]("a reason")


def sleep(request: float, send: Callable[[Any], None]) -> None:
    send(os.getpid())
    time.sleep(request)


def start_another(request: float, send: Callable[[Any], None]) -> None:
    send(subprocess.Popen(["sleep", str(request)]).pid)
    time.sleep(request)


def test_answers_arrive_in_order_from_another_process() -> None:
    with Isolated(f"{HERE}:answer", ["a", {"b": None}], ENVIRON) as process:
        found = list(process.answers())
    assert [item for item, _ in found] == ["a", {"b": None}] and {pid for _, pid in found} != {os.getpid()}


@pytest.mark.parametrize(
    ("how", "kind", "reason"),
    [("usage", UsageError, "^a reason$"), ("bug", RuntimeError, "KeyError"), ("die", ClusterError, "-6")],
)
def test_an_error_follows_what_was_answered(how: str, kind: type[Exception], reason: str) -> None:
    found: list[object] = []
    with Isolated(f"{HERE}:fail", how, ENVIRON) as process, pytest.raises(kind, match=reason):
        found += process.answers()
    assert found == ["first"]


def test_process_is_killed_at_the_deadline() -> None:
    with Isolated(f"{HERE}:sleep", 60, ENVIRON) as process, pytest.raises(TimeoutError):
        list(process.answers(1.5))


@pytest.mark.parametrize("function", ["sleep", "start_another"])
def test_process_ends_with_its_parent_and_what_it_has_started(function: str) -> None:
    call = f"next(Isolated('{HERE}:{function}', 60).answers())"
    code = f"import os; from ddptrain.isolated import Isolated; print({call}, flush=True); os._exit(1)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRON, capture_output=True, text=True, timeout=60, check=False
    )
    psutil.wait_procs([psutil.Process(int(done.stdout))] if psutil.pid_exists(int(done.stdout)) else [], timeout=10)
    assert not psutil.pid_exists(int(done.stdout))


def test_process_finds_modules_of_a_changed_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def main(request, send):\n    send(request)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with Isolated("only_here:main", 1) as process:
        assert list(process.answers()) == [1]
