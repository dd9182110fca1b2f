"""Ranks of a worker: how they are started and stopped, and what they are given."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from distributed import Worker

from ddptrain.protocol import events, news
from ddptrain.protocol.news import News, RankExit, RankNews
from ddptrain.protocol.rank_spec import SLOT_RESOURCE, RankSpec, key_prefix
from ddptrain.worker import rank_environment, rank_host, rank_task
from ddptrain.worker.rank_host import RankHost
from ddptrain.worker.rank_server_client import RankServerClient, RankServerLost
from tests.support.command import wait_until
from tests.unit.specs import make_spec

# --- When the worker plugin stops ranks, and which slot each of them has ---


class FakeServer:
    """Records which children it is asked to stop."""

    def __init__(self, python: str = sys.executable) -> None:
        self.python, self.ranks = python, 0
        self.stopped: list[tuple[str, float]] = []
        self.fault: str | None = None
        self.closed = False

    def listen(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        self.closed = True

    def stop(self, child_id: str, grace_s: float) -> None:
        self.stopped.append((child_id, grace_s))


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


def host_with(server: FakeServer, folder: Path, *gpus: str) -> RankHost:
    host = RankHost(
        cast(RankServerClient, server),
        lambda python: cast(RankServerClient, FakeServer(python)),
        {},
        gpus,
        folder / "scratch",
    )
    tasks = {"r": SimpleNamespace(state="executing")}
    host.setup(cast(Worker, SimpleNamespace(name="w-1", state=SimpleNamespace(tasks=tasks))))
    return host


def test_runs_of_an_environment_have_its_rank_server_until_another_one_is_used(
    server: FakeServer, tmp_path: Path
) -> None:
    def held() -> int:
        return os.open(tmp_path, os.O_RDONLY)

    def still_held(descriptor: int) -> bool:
        return os.path.exists(f"/proc/self/fd/{descriptor}")

    host = host_with(server, tmp_path)
    one, again, two, other = held(), held(), held(), held()
    host.use_python("a", "/env/one", one)
    host.use_python("b", "/env/one", again)
    key = f"{key_prefix('a')}1/0"
    first = cast(FakeServer, host.server_of(key))
    assert first.python == "/env/one" and host.server_of(f"{key_prefix('b')}1/0") is host.server_of(key)
    assert cast(FakeServer, host.server_of(f"{key_prefix('c')}1/0")) is server
    assert still_held(one) and not still_held(again)
    host.register(key, key, 30.0)
    host.stop(key)
    assert (first.stopped, server.stopped) == ([(key, 30.0)], [])
    first.fault = "killed"
    host.use_python("a", "/env/one", held())
    assert cast(FakeServer, host.server_of(key)) is not first
    host.use_python("a", "/env/two", two)
    assert still_held(one), "run b uses it"
    host.remove_run("b")
    host.use_python("d", "/env/other", other)
    assert not still_held(one) and still_held(two) and still_held(other)
    assert [each.python for each in host.servers] == [sys.executable, "/env/two", "/env/other"]
    host.close_servers()
    assert not still_held(two) and not still_held(other) and server.closed


def test_released_rank_gets_its_grace_period_up_to_a_limit(server: FakeServer, tmp_path: Path) -> None:
    host = host_with(server, tmp_path)
    host.register("patient", "patient", 30.0)
    host.register("quick", "quick", 1.5)
    host.register("patient", "patient/store", 0.0)
    host.transition("patient", "executing", "memory")
    assert server.stopped == []
    host.transition("patient", "executing", "cancelled")
    host.transition("quick", "executing", "released")
    host.transition("quick", "released", "forgotten")
    assert server.stopped == [("patient", 5.0), ("patient/store", 0.0), ("quick", 1.5)]


def test_rank_that_was_stopped_before_its_start_is_stopped_after_it(server: FakeServer, tmp_path: Path) -> None:
    host = host_with(server, tmp_path)
    keys = [f"{key_prefix(run)}1/0" for run in ("removed", "kept")]
    for key in keys:
        host.stop(key, 2.0)  # the driver's SIGTERM, while the task of the rank begins
    host.remove_run("removed")
    for key in [*keys, "other"]:
        host.register(key, key, 30.0)
        host.stop_if_told(key)
    assert server.stopped == [(keys[1], 2.0)]


# --- The task of all ranks of a worker: how their news travel, and what the failure of one means for the ---


class RankTaskFakeServer:
    """Ranks that write an event and exit with their number, at once; the rank `refused` cannot be started."""

    def __init__(self, refused: int = -1, *, lasts: bool = False) -> None:
        self.refused, self.lasts = refused, lasts
        self.started: list[RankSpec] = []
        self.ended: list[str] = []
        self.exits: dict[str, dict[str, Any]] = {}
        self.stores: list[str] = []
        self.killed: list[str] = []
        self.written = events.encode(events.Entered(1))
        self.fault, self.closed, self.ranks = None, False, 0

    def listen(self) -> None:
        """Do nothing."""

    def start_store(self, store_id: str, *_: object) -> None:
        self.stores.append(store_id)

    def start_rank(
        self, rank_id: str, spec_json: str, log: int, written: int, slot: str, woken: threading.Event
    ) -> None:
        spec = RankSpec.from_json(spec_json)
        if spec.rank == self.refused:
            raise RankServerLost("it is gone")
        with open(written, "wb", closefd=False) as file:
            file.write(self.written)
        self.started.append(spec)
        if not self.lasts:
            self.finish()
        woken.set()

    def finish(self) -> None:
        """End the ranks that run."""
        for spec in self.started[len(self.ended) :]:
            self.ended.append(spec.key)
            self.exits[spec.key] = {"report": "exited", "pid": 9, "status": spec.rank, "time_ns": 1}

    def exit_of(self, rank_id: str) -> dict[str, Any] | None:
        return self.exits.pop(rank_id, None)

    def start_of(self, rank_id: str) -> tuple[int, str]:
        return os.getpgid(0), "forked"

    def stop(self, child_id: str, grace_s: float) -> None:
        self.killed.append(child_id)


class Stage:
    """A worker with a host of ranks, and the messages that it has sent."""

    def __init__(self, folder: Path, server: RankTaskFakeServer, *gpus: str) -> None:
        self.messages: list[dict[str, Any]] = []
        self.tasks = {"ddptrain/r-1/1/0": SimpleNamespace(state="executing")}
        state = SimpleNamespace(tasks=self.tasks, total_resources={SLOT_RESOURCE: 2}, nthreads=2)
        worker = SimpleNamespace(name="w", address="tcp://127.0.0.1:1", state=state, plugins={}, nanny=None)
        worker.local_directory = str(folder / "uploaded")
        worker.log_event = self._take
        self.worker = cast(Worker, worker)
        client = cast(RankServerClient, server)
        self.host = RankHost(client, lambda _: client, {}, gpus, folder / "scratch")
        self.host.setup(self.worker)

    def _take(self, topic: str, message: dict[str, Any]) -> None:
        if topic == rank_task.topic("r-1"):
            self.messages.append(message)

    def run(self, *specs: RankSpec) -> list[RankExit | Exception]:
        return rank_task.RanksTask(self.worker, self.host, specs).run()

    @property
    def news(self) -> list[News]:
        return [news.decode({**message, "worker": "w"}) for message in self.messages]


def specs(count: int, **changes: Any) -> list[RankSpec]:
    return [make_spec(rank=rank, slot=rank, master_addr="127.0.0.1", **changes) for rank in range(count)]


def test_ranks_of_a_worker_start_together_and_their_news_share_messages(tmp_path: Path) -> None:
    server = RankTaskFakeServer()
    stage = Stage(tmp_path, server)
    ended = stage.run(*specs(3, master_port=0))
    assert [each.status for each in ended if isinstance(each, RankExit)] == [0, 1, 2]
    first, begun, last = stage.news
    assert first.store_port and {spec.group.master_port for spec in server.started} == {first.store_port}
    assert server.stores == ["ddptrain/r-1/1/0/store"]
    assert begun == News(1, worker="w")  # a sign of life
    assert [(part.rank, part.ended.status) for part in last.ranks if part.ended is not None] == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]
    assert all(part.events_size > 0 for part in last.ranks)
    assert server.killed == []


def test_bytes_go_along_if_the_driver_does_not_see_the_files(tmp_path: Path) -> None:
    stage = Stage(tmp_path, RankTaskFakeServer())
    stage.run(*specs(1, shared=False))
    parts = [part for each in stage.news for part in each.ranks]
    assert b"".join(part.events for part in parts) == events.encode(events.Entered(1)) and parts[-1].ended


def test_rank_that_cannot_be_started_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    stage = Stage(tmp_path, RankTaskFakeServer(refused=1))
    ended = stage.run(*specs(3))
    assert [type(each) for each in ended] == [RankExit, RankServerLost, RankExit]
    assert RankNews(1, broken="it is gone") in [part for each in stage.news for part in each.ranks]


def test_ranks_of_a_key_that_was_released_meanwhile_are_killed(tmp_path: Path) -> None:
    server = RankTaskFakeServer()
    stage = Stage(tmp_path, server)
    stage.tasks["ddptrain/r-1/1/0"].state = "released"
    stage.run(*specs(2))
    assert {"ddptrain/r-1/1/0", "ddptrain/r-1/1/1"} <= set(server.killed)


def test_messages_have_a_limited_size(tmp_path: Path) -> None:
    server = RankTaskFakeServer()
    server.written = b"x" * 40_000
    stage = Stage(tmp_path, server)
    stage.run(*specs(1, shared=False))
    last = stage.news[-1].ranks[-1]
    assert last.ended is not None and last.events_size == 40_000  # the driver fetches what is over the rate limit
    assert max(sum(part.size_bytes for part in each.ranks) for each in stage.news) <= news.MAX_DATA_BYTES


class Nvml(ModuleType):
    """In the place of nvidia-ml-py: a broken GPU, whose calls hang until the end of the test."""

    NVMLError = NVMLError_NotSupported = NVMLError_FunctionNotFound = NVMLError_NoPermission = OSError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.asked, self.end = threading.Event(), threading.Event()

    def nvmlInit(self) -> None:  # noqa: N802
        self.asked.set()
        self.end.wait()


def test_gpu_that_hangs_does_not_silence_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    server = RankTaskFakeServer(lasts=True)
    stage = Stage(tmp_path, server, "0")
    task = threading.Thread(target=lambda: stage.run(*specs(1, lost_after_s=0.8)))
    task.start()
    try:
        assert nvml.asked.wait(60)
        seen = len(stage.messages)
        wait_until(lambda: len(stage.messages) > seen + 2, "news")
        assert all(part.cpu_s is not None for each in stage.news[seen:] for part in each.ranks)
        server.finish()
        task.join(60)
        assert stage.news[-1].ranks[-1].ended is not None
    finally:
        nvml.end.set()


# --- A rank's environment: the user's values win, tuned values are reported, and torchrun's variables are set ---


def completed(
    environ: Mapping[str, str],
    *,
    gpu: str | None = None,
    cores: int = 8,
    slots: int = 2,
    interface: str | None = "eth7",
    **changes: Any,
) -> RankSpec:
    spec = make_spec(**{"rank": 3, "local_rank": 1, "node_rank": 1, "slot": 1, **changes})
    host = rank_environment.HostResources(cores, slots, interface)
    return rank_environment.complete(spec, environ, host, gpu, "/s")


@pytest.mark.parametrize(
    ("cores", "ranks", "slots", "threads"),
    [
        (8, 2, 2, 4),
        (8, 2, 1, 4),  # two workers with a slot each
        (8, 1, 4, 2),  # the other slots may get ranks of other runs
        (8, 1, 1, 8),
        (1, 2, 2, 1),
    ],
)
def test_cores_are_shared_by_the_ranks_and_slots_of_a_host(cores: int, ranks: int, slots: int, threads: int) -> None:
    spec = completed({}, cores=cores, slots=slots, local_world_size=ranks)
    assert (spec.env["OMP_NUM_THREADS"], spec.host.cpu_threads) == (str(threads), threads)


@pytest.mark.parametrize(
    ("environ", "changes", "expected"),
    [
        ({}, {}, {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}),
        ({}, {}, {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "TORCHELASTIC_RUN_ID": "r-1"}),
        ({}, {"attempt": 3}, {"TORCHELASTIC_RESTART_COUNT": "2"}),
        ({"RANK": "9"}, {"env": {"WORLD_SIZE": "9"}}, {"RANK": "3", "WORLD_SIZE": "4"}),  # torchrun's win
        ({"A": "worker"}, {"env": {"A": "config"}}, {"A": "config"}),
        ({"OMP_NUM_THREADS": "3", "MALLOC_TRIM_THRESHOLD_": "1"}, {}, {"OMP_NUM_THREADS": "3"}),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"gpu": "1"}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, {}, {"CUDA_VISIBLE_DEVICES": ""}),
        ({}, {"gpu": "GPU-1", "use_gpu": False}, {"CUDA_VISIBLE_DEVICES": ""}),
        ({}, {}, {"GLOO_SOCKET_IFNAME": "eth7"}),
        ({}, {"interface": None}, {"GLOO_SOCKET_IFNAME": None}),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, {}, {"GLOO_SOCKET_IFNAME": "ib0"}),
        ({}, {}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": None}),
        ({}, {"backend": "nccl"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}),
        ({}, {"backend": "nccl"}, {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/s/flight-record-"}),
        ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}, {"backend": "nccl"}, {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}),
        ({}, {"gpu": "3", "local_gpus": ("7", "3")}, {"CUDA_VISIBLE_DEVICES": "3"}),
        # A script sees the GPUs of all ranks beside it, and torchrun's other variables.
        ({}, {"gpu": "3", "script": "a.py", "local_gpus": ("7", "3")}, {"CUDA_VISIBLE_DEVICES": "7,3"}),
        ({}, {"script": "a.py", "hosts": 2}, {"GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4"}),
        ({}, {"script": "a.py"}, {"ROLE_NAME": "default", "TORCHELASTIC_ERROR_FILE": "/s/error.json"}),
    ],
)
def test_environment_of_a_rank(
    environ: dict[str, str], changes: dict[str, Any], expected: dict[str, str | None]
) -> None:
    spec = completed(environ, **changes)
    assert {name: spec.env.get(name) for name in expected} == expected
    for name in spec.host.environment.keys() & environ.keys():  # the user's values are recorded as such
        assert spec.host.environment[name] == {"value": environ[name], "source": "user"}
    assert spec.host.environment["OMP_NUM_THREADS"]["source"] == (
        "user" if environ.get("OMP_NUM_THREADS") else "ddptrain"
    )
    assert "hunter2" not in repr(completed({}, env={"TOKEN": "hunter2"}))


def test_variables_of_dask_reach_neither_the_rank_server_nor_a_rank() -> None:
    nanny = {"OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1}
    environ = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "4", "DASK_INTERNAL_INHERIT_CONFIG": "e30=", "DASK_A": "b"}
    assert rank_environment.without_nanny(environ, nanny) == {"MKL_NUM_THREADS": "4", "DASK_A": "b"}
    own = rank_environment.server_environment(environ)
    assert "DASK_INTERNAL_INHERIT_CONFIG" not in own
    assert own["OPENBLAS_NUM_THREADS"] == "1"  # a process with threads must not fork


def test_interface_is_the_one_that_carries_the_address() -> None:
    lo = rank_environment.interface_of("127.0.0.1")
    assert lo in psutil.net_if_addrs() and rank_environment.interface_of("127.0.0.77") == lo
    assert rank_environment.interface_of("203.0.113.1") is None


# --- What foreign workers offer ---


def worker(*, nthreads: int = 1, nanny: str | None = None, **resources: float) -> Worker:
    """The used part of a Dask worker."""
    state = SimpleNamespace(total_resources=resources, nthreads=nthreads)
    return cast(Worker, SimpleNamespace(plugins={}, state=state, nanny=nanny))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs; CUDA_VISIBLE_DEVICES selects some of them."""

    def visible(environ: dict[str, str]) -> tuple[str, ...]:
        return tuple(environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(","))

    monkeypatch.setattr(rank_host, "visible_gpus", visible)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("chosen", "known", "offered"),
    [
        (None, {}, (1, ())),  # dask worker without resources
        ("2,3,0,1", {}, (1, ("2",))),  # dask cuda worker rotates the list: the first GPU is its own
        (None, {"GPU": 1.0}, (1, ("0",))),  # Coiled
        (None, {"slot": 2.0, "nthreads": 8}, (2, ())),
        (None, {"slot": 4.0, "GPU": 2.0, "nthreads": 8}, (4, ("0", "1"))),
        ("3,1", {"slot": 4.0, "GPU": 4.0, "nthreads": 8}, (4, ("3", "1"))),
        (None, {"slot": 4.0, "nthreads": 2}, (2, ())),  # it has only two threads
    ],
)
def test_offer_is_a_slot_with_its_gpu_or_what_the_resources_say(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, known: dict[str, Any], offered: tuple[int, tuple[str, ...]]
) -> None:
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert rank_host.offered_slots(worker(**known)) == offered
