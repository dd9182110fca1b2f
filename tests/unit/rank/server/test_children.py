"""A rank is forked only if a fork is equivalent to a fresh process."""

from __future__ import annotations

import os
import signal
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
    monkeypatch.setattr(children, "_start_cold", lambda env, fds, why: COLD)
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


@pytest.mark.parametrize(
    "variable", ["LD_PRELOAD", "PYTHONHASHSEED", "LC_ALL", "TORCH_LOGS", "PYTORCH_ALLOC_CONF", "OMP_PROC_BIND"]
)
def test_variable_that_only_a_fresh_process_reads_needs_a_cold_start(
    started: list[set[int]], spec_file: IO[bytes], variable: str
) -> None:
    assert start(spec_file, **{variable: "7"}) == (COLD, f"cold: only a new process reads {variable}")
    assert started == []


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "TORCH_NCCL_DUMP_ON_TIMEOUT", "OMP_NUM_THREADS"])
def test_variable_that_is_read_later_needs_no_cold_start(
    started: list[set[int]], spec_file: IO[bytes], variable: str
) -> None:
    assert start(spec_file, **{variable: "7"}) == (FORKED, "forked")


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


def test_cold_start_reads_the_spec_from_its_beginning(started: list[set[int]], spec_file: IO[bytes]) -> None:
    start(spec_file, why_cold="it still imports")
    assert os.lseek(spec_file.fileno(), 0, os.SEEK_CUR) == 0


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
