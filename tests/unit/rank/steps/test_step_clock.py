"""Own time and wait of real DDP models, in two processes."""

from __future__ import annotations

import copy
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from ddptrain.rank.steps.non_training_time import OtherTime
from ddptrain.rank.steps.step_clock import StepClock, _Mark

SLEEP_S = 0.1
Measured = list[tuple[float, float]]


def rank_process(rank: int, port: int, folder: str) -> None:
    """Train with a rank 1 that is slower in its own work; store what was measured in each part."""
    store = distributed.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.set_num_threads(1)
    found = {"plain": plain(rank), "no_sync": accumulated(rank), "other": with_other_time(rank), "same": gradients()}
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def two_ranks(_: int, port: int, folder: str) -> None:
    """Be rank 0, and fork rank 1: a process that is started imports torch, for 2 s of CPU time."""
    forked = os.fork()
    if forked == 0:
        code = 1
        try:
            rank_process(1, port, folder)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    try:
        rank_process(0, port, folder)
    finally:
        _, status = os.waitpid(forked, 0)
    assert status == 0, "rank 1 has failed"


def watched(other: OtherTime | None = None) -> tuple[DistributedDataParallel, Measured]:
    measured: Measured = []
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
    clock = StepClock(lambda own_s, waited_s: measured.append((own_s, waited_s)), other or OtherTime())
    clock.watch(model)
    return model, measured


def step(model: nn.Module) -> None:
    model(torch.ones(4, 8)).sum().backward()


def plain(rank: int) -> Measured:
    model, measured = watched()
    for _ in range(6):
        time.sleep(SLEEP_S * rank)
        step(model)
    return measured


def accumulated(rank: int) -> Measured:
    """Each second backward pass exchanges gradients."""
    model, measured = watched()
    for _ in range(4):
        with model.no_sync():
            time.sleep(SLEEP_S * rank)
            step(model)
        step(model)
    return measured


def with_other_time(rank: int) -> Measured:
    other = OtherTime()
    model, measured = watched(other)
    for _ in range(4):
        with other:
            time.sleep(SLEEP_S * rank)
        step(model)
    return measured


def gradients() -> bool:
    """Whether a watched model has the same gradients as another one, and can be copied."""
    model, _ = watched()
    torch.manual_seed(0)
    unwatched = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
    for one in (model, unwatched):
        step(one)
    pairs = zip(model.parameters(), unwatched.parameters(), strict=True)
    twin: Any = copy.deepcopy(model.module)
    assert all(not parameter._backward_hooks for parameter in twin.parameters())
    return all(first.grad is not None and torch.equal(first.grad, second.grad) for first, second in pairs)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("steps")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    spawn(two_ranks, (port, str(folder)), 1)
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_slow_rank_works_while_the_other_one_waits(measured: list[dict[str, Any]]) -> None:
    fast, slow = (one["plain"] for one in measured)
    assert len(fast) == len(slow) == 5  # the first step has no beginning
    assert mean([own for own, _ in slow]) >= SLEEP_S
    assert mean([waited for _, waited in fast]) >= 0.7 * SLEEP_S
    assert mean([own for own, _ in fast]) < 0.7 * mean([own for own, _ in slow])


def test_passes_without_an_exchange_belong_to_the_next_step(measured: list[dict[str, Any]]) -> None:
    slow = measured[1]["no_sync"]
    assert len(slow) == 3
    assert all(own >= SLEEP_S for own, _ in slow)


def test_other_time_is_not_own_work(measured: list[dict[str, Any]]) -> None:
    assert mean([own for own, _ in measured[1]["other"]]) < 0.7 * SLEEP_S


def test_gradients_are_the_same(measured: list[dict[str, Any]]) -> None:
    assert [one["same"] for one in measured] == [True, True]


class Moment:
    """A CUDA event at a number of milliseconds; `is_over`: the device has come to it."""

    def __init__(self, at_ms: float, *, is_over: bool = True) -> None:
        self.at_ms, self.is_over = at_ms, is_over

    def query(self) -> bool:
        return self.is_over

    def elapsed_time(self, later: Moment) -> float:
        return later.at_ms - self.at_ms


def test_steps_of_a_gpu_are_reported_in_order_once_the_device_has_come_to_their_end() -> None:
    measured: Measured = []
    clock = StepClock(lambda own_s, waited_s: measured.append((own_s, waited_s)))
    clock._on_gpu = True

    def mark(at_ms: float, other_s: float = 1.0, *, is_over: bool = True) -> _Mark:
        return _Mark(Moment(at_ms, is_over=is_over), other_s)

    late = mark(9000.0, 1.0, is_over=False)
    clock._measure((mark(0.0, 1.0), mark(2000.0, 1.5), mark(5000.0)))
    assert measured == [(1.5, 3.0)]
    clock._measure((mark(5000.0), mark(8000.0), late))
    clock._measure((mark(0.0, 1.0), mark(1000.0, 3.0), mark(1250.0)))
    assert len(measured) == 1, "the second step waits, and the third one for it"
    late.at.is_over = True
    clock._measure((mark(0.0), mark(500.0), mark(500.0)))
    assert measured[1:] == [(3.0, 1.0), (0.0, 0.25), (0.5, 0.0)]


def test_a_step_has_own_time_without_other_work_and_a_wait_and_the_first_one_only_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: Measured = []
    firsts: list[int] = []
    clock = StepClock(lambda own_s, waited_s: measured.append((own_s, waited_s)), first=lambda: firsts.append(1))
    queued: list[Callable[[], None]] = []
    marks = iter([_Mark(1.0, 0.0), _Mark(1.5, 0.0), _Mark(4.5, 1.0), _Mark(5.0, 1.0), _Mark(6.0, 3.0), _Mark(8.0, 3.0)])
    monkeypatch.setattr(clock, "_queue", queued.append)
    monkeypatch.setattr(clock, "_mark", lambda: next(marks))
    for _ in range(3):
        clock._on_arrived()
        assert queued == [clock._on_left]
        queued.pop()()
    assert firsts == [1]
    assert measured == [(2.0, 0.5), (0.0, 2.0)]


def test_a_measurement_that_fails_is_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock(lambda own_s, waited_s: 1 / 0)  # type: ignore[arg-type]
    monkeypatch.setattr(clock, "_queue", lambda callback: None)
    for is_off in (False, True):
        clock._on_arrived()
        clock._on_left()
        assert clock._is_off is is_off
