"""Calls of the kernel, number of threads, and signals to groups that may be gone."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddptrain.rank.server import process_control


@pytest.mark.parametrize(("threads", "count"), [(("1",), 1), (("1", "2", "3"), 3), (None, 1)])
def test_threads_are_counted_where_the_system_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: tuple[str, ...] | None, count: int
) -> None:
    folder = tmp_path / "task"
    for name in threads or ():
        (folder / name).mkdir(parents=True)
    monkeypatch.setattr(process_control, "Path", lambda path: folder)
    assert process_control.thread_count() == count


@pytest.mark.parametrize("error", [None, ProcessLookupError, PermissionError])
def test_signal_to_a_group_that_is_gone_is_no_error(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError] | None
) -> None:
    sent: list[tuple[int, int]] = []

    def killpg(group: int, number: int) -> None:
        sent.append((group, number))
        if error is not None:
            raise error

    monkeypatch.setattr(os, "killpg", killpg)
    process_control.signal_group(77, signal.SIGTERM)
    assert sent == [(77, signal.SIGTERM)]


def test_all_descendants_are_killed_parents_first(monkeypatch: pytest.MonkeyPatch) -> None:
    children = {os.getpid(): [10, 20], 10: [11], 11: [12]}
    killed: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        if pid == 10:
            raise ProcessLookupError

    monkeypatch.setattr(process_control, "_children", lambda pid: children.get(pid, []))
    monkeypatch.setattr(os, "kill", kill)
    process_control.kill_descendants()
    assert killed == [(pid, signal.SIGKILL) for pid in (10, 11, 12, 20)]


def test_children_of_all_threads_of_a_process_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for thread, children in (("7", "10 11 "), ("8", "12"), ("9", "")):
        folder = tmp_path / "proc" / "7" / "task" / thread
        folder.mkdir(parents=True)
        (folder / "children").write_text(children)
    listed = os.listdir
    monkeypatch.setattr(process_control, "Path", lambda path: tmp_path / path[1:])
    monkeypatch.setattr(os, "listdir", lambda path: listed(tmp_path / path[1:]))
    assert sorted(process_control._children(7)) == [10, 11, 12]
    assert process_control._children(8) == [], "it has ended"


# --- calls of the kernel ---


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of the C library."""
    calls: list[Any] = []

    def c_signal(*given: Any) -> None:
        calls.append(("signal", *given))

    def load(name: None) -> Any:
        return SimpleNamespace(prctl=lambda *given: calls.append(given), signal=c_signal)

    monkeypatch.setattr(ctypes, "CDLL", load)
    return calls


def test_kernel_is_told_what_happens_with_parent_and_orphans(kernel: list[Any]) -> None:
    process_control.die_with_parent(os.getppid())
    process_control.become_subreaper()
    assert kernel == [(1, signal.SIGKILL, 0, 0, 0), (36, 1, 0, 0, 0)]


def test_another_system_is_told_nothing(kernel: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    process_control.die_with_parent(os.getppid())
    assert kernel == []


@pytest.mark.parametrize(("parent", "status"), [("os.getppid()", 0), ("os.getppid() + 1", -signal.SIGKILL)])
def test_process_ends_at_once_if_its_parent_has_ended_before(parent: str, status: int) -> None:
    code = f"import os; from ddptrain.rank.server.process_control import *; die_with_parent({parent})"
    assert subprocess.run([sys.executable, "-c", code]).returncode == status


def test_process_ends_by_sigterm_with_the_default_handler(kernel: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", lambda *given: kernel.append(("kill", *given)))
    process_control.die_of_sigterm()
    assert kernel == [("signal", 15, None), ("kill", os.getpid(), signal.SIGTERM)]


def test_process_has_a_short_name_and_a_title_that_leaves_its_environment_alone(
    kernel: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[tuple[str, str | None]] = []
    module = SimpleNamespace(setproctitle=lambda title: titles.append((title, os.environ.get("SPT_NOENV"))))
    monkeypatch.setitem(sys.modules, "setproctitle", module)
    monkeypatch.delenv("SPT_NOENV", raising=False)
    process_control.name_process("ddptrain-rank-100", "ddptrain rank 100 of r-1")
    assert titles == [("ddptrain rank 100 of r-1", "1")] and "SPT_NOENV" not in os.environ
    process_control.name_process("short")
    assert len(titles) == 1 and kernel == [(15, b"ddptrain-rank-1", 0, 0, 0), (15, b"short", 0, 0, 0)]
    monkeypatch.setitem(sys.modules, "setproctitle", None)  # it is not installed
    process_control.name_process("rank", "title")
    assert kernel[-1] == (15, b"rank", 0, 0, 0) and "SPT_NOENV" not in os.environ
