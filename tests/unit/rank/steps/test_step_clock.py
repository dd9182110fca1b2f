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
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from ddptrain.protocol import events
from ddptrain.rank.steps import step_clock
from ddptrain.rank.steps.step_clock import StepClock, _Mark
from ddptrain.rank.steps.timed_activities import OtherTime

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
        clock._on_ready()
        assert queued == [clock._on_exchanged]
        queued.pop()()
    assert firsts == [1]
    assert measured == [(2.0, 0.5), (0.0, 2.0)]


def test_a_measurement_that_fails_is_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock(lambda own_s, waited_s: 1 / 0)  # type: ignore[arg-type]
    monkeypatch.setattr(clock, "_queue", lambda callback: None)
    for is_off in (False, True):
        clock._on_ready()
        clock._on_exchanged()
        assert clock._is_off is is_off


# --- without ranks ---


class Parameter:
    """A parameter of a model; `hooks` are those that were registered."""

    def __init__(self, device: str = "cpu", *, requires_grad: bool = True) -> None:
        self.device, self.requires_grad = torch.device(device), requires_grad
        self.hooks: list[Callable[[Any], None]] = []

    def register_hook(self, hook: Callable[[Any], None]) -> None:
        self.hooks.append(hook)


class Model:
    """A model that DDP has wrapped."""

    process_group = "group"
    require_backward_grad_sync = True

    def __init__(self, *parameters: Parameter) -> None:
        self._parameters = parameters

    def parameters(self) -> tuple[Parameter, ...]:
        return self._parameters


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    """A clock in a group of two ranks, whose backward pass is number 5."""
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 2 if group == "group" else 0)
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 5)
    return StepClock(lambda own_s, waited_s: None)


@pytest.mark.parametrize(
    ("parameters", "hooks"),
    [
        ([Parameter(), Parameter(), Parameter()], [1, 0, 1]),
        ([Parameter(requires_grad=False), Parameter(), Parameter(), Parameter(requires_grad=False)], [0, 1, 1, 0]),
        ([Parameter()], [1]),
        ([Parameter("cuda"), Parameter("cuda")], [1, 1]),
        ([Parameter("mps"), Parameter("mps")], [0, 0]),
    ],
)
def test_first_and_last_gradient_of_a_model_are_watched_if_there_are_other_ranks(
    clock: StepClock, monkeypatch: pytest.MonkeyPatch, parameters: list[Parameter], hooks: list[int]
) -> None:
    clock.watch(Model(*parameters))  # type: ignore[arg-type]
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 1)
    clock.watch(Model(*parameters))  # type: ignore[arg-type]
    assert [len(parameter.hooks) for parameter in parameters] == hooks


def test_backward_pass_is_measured_once_if_it_exchanges_gradients(
    clock: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = [5]
    queued: list[Callable[[], None]] = []
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: task[0])
    monkeypatch.setattr(clock, "_queue", queued.append)
    first, last = Parameter("cuda"), Parameter("cuda")
    model = Model(first, last)
    clock.watch(model)  # type: ignore[arg-type]
    first.hooks[0](None)
    last.hooks[0](None)
    assert queued == [clock._on_ready] and clock._on_gpu
    task[0], model.require_backward_grad_sync = 6, False
    first.hooks[0](None)
    assert len(queued) == 1
    task[0], model.require_backward_grad_sync = 7, True
    last.hooks[0](None)
    assert len(queued) == 2
    task[0], clock._is_off = 8, True
    first.hooks[0](None)
    clock._is_off = False
    del model  # the hook holds no reference to it
    last.hooks[0](None)
    assert len(queued) == 2


def test_callback_comes_after_those_of_the_engine(clock: StepClock, monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[Any] = []
    engine = SimpleNamespace(queue_callback=queued.append)
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", engine)
    clock._queue(clock._on_exchanged)
    assert queued == [clock._on_exchanged]


class Event:
    """A CUDA event."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.enable_timing, self.recorded = enable_timing, 0

    def record(self) -> None:
        self.recorded += 1


def test_moment_is_read_from_the_cpu_or_recorded_in_the_stream(
    clock: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing = [False]
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: 7.5))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock._other = OtherTime()
    clock._other.total_s = 2.0
    assert clock._mark() == (7.5, 2.0)
    clock._on_gpu = True
    mark = clock._mark()
    assert mark is not None and mark.other_s == 2.0
    assert (mark.at.enable_timing, mark.at.recorded) == (True, 1)
    capturing[0] = True
    assert clock._mark() is None


def test_step_whose_moment_is_unknown_is_left_out(clock: StepClock, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    firsts: list[int] = []
    at = [_Mark(float(second), 0.0) for second in range(10)]
    # Each step: the gradients of this rank, those of all ranks.
    marks = iter([at[0], None, at[1], at[2], None, at[3], at[4], at[5], at[6]])
    clock._first = lambda: firsts.append(1)
    monkeypatch.setattr(clock, "_queue", lambda callback: None)
    monkeypatch.setattr(clock, "_mark", lambda: next(marks))
    monkeypatch.setattr(clock, "_measure", measured.append)
    for _ in range(4):
        clock._on_ready()
        clock._on_exchanged()
    assert measured == [(at[3], at[4], at[5])] and firsts == [1]
    clock._on_exchanged()
    assert len(measured) == 1, "nothing has arrived"


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """DDP without ranks; the clocks that were made, and what was wrapped and watched."""
    done: list[Any] = []

    class Clock:
        def __init__(self, report: Any, first: Any) -> None:
            self.report, self.first = report, first
            done.append(self)

        def watch(self, model: Any) -> None:
            done.append("watched")

    monkeypatch.setattr(step_clock, "StepClock", Clock)
    monkeypatch.setattr(
        DistributedDataParallel, "_ddp_init_helper", lambda self, *given, **options: done.append((given, options))
    )
    return done


@pytest.mark.parametrize("compares", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_steps_of_each_wrapped_model_are_added_up_and_summarized(
    wrapped: list[Any], monkeypatch: pytest.MonkeyPatch, compares: bool, adds: bool
) -> None:
    told, windows = list[Any](), list[tuple[float, ...]]()

    class Window:
        def add(self, own_s: float, waited_s: float, now: float) -> tuple[int, float, float] | None:
            windows.append((own_s, waited_s, now))
            return (3, 0.5, 0.25) if own_s == 2.0 else None

    def emit(event: Any) -> None:
        told.append(event)
        raise OSError("disk full")

    monkeypatch.setattr(step_clock, "StepWindow", Window)
    monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: 7.5, time_ns=lambda: 77))
    waiting: Any = SimpleNamespace(add=lambda *given: told.append(given), first_step=lambda: told.append("first"))
    emitter: Any = SimpleNamespace(emit=emit) if compares else None
    step_clock.measure_steps(emitter, waiting if adds else None)
    ddp: Any = DistributedDataParallel
    ddp._ddp_init_helper("ddp", "model", device_ids=[0])
    clock, made, watched_model = wrapped
    assert (made, watched_model) == ((("model",), {"device_ids": [0]}), "watched")
    clock.report(1.0, 0.5)
    clock.report(2.0, 0.75)
    clock.first()
    waits = [("ranks", 0.5), ("ranks", 0.75)] if adds else []
    assert [one for one in told if isinstance(one, tuple)] == waits
    assert [one for one in told if isinstance(one, events.StepTimes)] == (
        [events.StepTimes(77, 3, 0.5, 0.25)] if compares else []
    )
    assert ("first" in told) is adds
    assert windows == ([(1.0, 0.5, 7.5), (2.0, 0.75, 7.5)] if compares else [])
