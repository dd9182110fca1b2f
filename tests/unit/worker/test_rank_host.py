"""When the worker plugin stops ranks, and which slot each of them has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from distributed import Worker

from ddptrain.errors import ClusterError
from ddptrain.protocol.rank_spec import key_prefix
from ddptrain.worker.rank_host import RankHost, slot_resources
from ddptrain.worker.rank_server_client import RankServerClient


class FakeServer:
    """Records which children it is asked to stop."""

    def __init__(self) -> None:
        self.stopped: list[tuple[str, float]] = []
        self.fault: str | None = None
        self.closed = False

    def listen(self) -> None:
        """Does nothing."""

    def stop(self, child_id: str, grace_s: float) -> None:
        self.stopped.append((child_id, grace_s))


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


def host_with(server: FakeServer, folder: Path, *gpus: str) -> RankHost:
    host = RankHost(
        cast(RankServerClient, server), lambda: cast(RankServerClient, FakeServer()), {}, gpus, folder / "scratch"
    )
    tasks = {"r": SimpleNamespace(state="executing")}
    host.setup(cast(Worker, SimpleNamespace(name="w-1", state=SimpleNamespace(tasks=tasks))))
    return host


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


def test_stopped_rank_gets_the_grace_period_of_the_driver(server: FakeServer, tmp_path: Path) -> None:
    host = host_with(server, tmp_path)
    host.register("r", "r", 30.0)
    host.stop("r")
    host.stop("r", 2.0)
    host.stop("unknown")
    assert server.stopped == [("r", 30.0), ("r", 2.0)]


def test_rank_that_was_stopped_before_its_start_is_stopped_after_it(server: FakeServer, tmp_path: Path) -> None:
    host = host_with(server, tmp_path)
    host.stop("ddptrain/a/1/0", 2.0)  # the driver's SIGTERM, while the task of the rank begins
    host.register("r", "ddptrain/a/1/0", 30.0)
    host.register("r", "ddptrain/a/1/1", 30.0)
    for key in ("ddptrain/a/1/0", "ddptrain/a/1/1"):
        host.stop_if_told(key)
    assert server.stopped == [("ddptrain/a/1/0", 2.0)]


def test_stops_of_a_run_are_forgotten_with_it(server: FakeServer, tmp_path: Path) -> None:
    host = host_with(server, tmp_path)
    keys = [f"{key_prefix(run)}1/0" for run in ("a", "b")]
    for key in keys:
        host.stop(key, 2.0)
    host.remove_run("a")
    for key in keys:
        host.register(key, key, 30.0)
        host.stop_if_told(key)
    assert server.stopped == [(keys[1], 2.0)]


def test_key_that_is_released_while_its_rank_starts_is_recognized(server: FakeServer, tmp_path: Path) -> None:
    host = host_with(server, tmp_path)
    host.register("r", "r", 30.0)
    assert not host.is_released("r")
    host.worker.state.tasks["r"].state = "cancelled"  # before it was registered
    assert host.is_released("r")
    host.worker.state.tasks["r"].state = "executing"
    host.transition("r", "executing", "cancelled")  # before it was started
    assert host.is_released("r")
    host.register("unknown", "unknown", 30.0)
    assert host.is_released("unknown")
    server.stopped.clear()
    host.kill("r")
    assert server.stopped == [("r", 0.0), ("r/store", 0.0)]


def test_only_a_lost_server_is_replaced(server: FakeServer, tmp_path: Path) -> None:
    host = host_with(server, tmp_path)
    host.replace_lost_server()
    assert host.server is cast(RankServerClient, server)
    server.fault = "the rank server was closed"
    server.closed = True
    host.replace_lost_server()
    assert host.server is cast(RankServerClient, server)
    server.closed = False
    host.replace_lost_server()
    assert host.server is not cast(RankServerClient, server)


def test_resources_say_how_many_ranks_fit_and_how_many_have_a_gpu() -> None:
    assert slot_resources(3, ()) == {"slot": 3.0}
    assert slot_resources(2, ("0", "1", "2")) == {"slot": 2.0, "GPU": 2.0}
    for slots, gpus in ((0, ()), (1025, ()), (2, ("0",))):
        with pytest.raises(ClusterError, match=f"{slots} slots were asked for"):
            slot_resources(slots, gpus)
