"""A rank is forked only if a fork is equivalent to a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import IO

import pytest

from ddptrain.rank.server import children
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


def test_cold_start_is_a_fresh_interpreter_that_cannot_import_from_the_working_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[str]] = []

    class Process:
        pid = 7

        def __init__(self, command: list[str], **_: object) -> None:
            commands.append(command)

    monkeypatch.setattr(subprocess, "Popen", Process)
    assert children._start_cold({}, (3, 4, 5, 6)) == 7
    assert commands == [[sys.executable, "-P", "-m", "ddptrain.rank.rank_process", "3", "4", "5", "6"]]
