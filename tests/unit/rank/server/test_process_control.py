"""Number of threads, and signals to groups that may be gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

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
