"""What foreign workers offer, and which of them share a rank server."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import dask
import pytest
from distributed import Worker

from ddptrain.worker import foreign_worker
from ddptrain.worker.rank_host import RankHost


def worker(*, nthreads: int = 1, nanny: str | None = None, **resources: float) -> Worker:
    """The used part of a Dask worker."""
    state = SimpleNamespace(total_resources=resources, nthreads=nthreads)
    return cast(Worker, SimpleNamespace(plugins={}, state=state, nanny=nanny))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs; CUDA_VISIBLE_DEVICES selects some of them."""

    def visible(environ: dict[str, str]) -> tuple[str, ...]:
        return tuple(environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(","))

    monkeypatch.setattr(foreign_worker, "visible_gpus", visible)
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
    assert foreign_worker.offered_slots(worker(**known)) == offered


def test_variables_of_the_nanny_come_from_its_configuration() -> None:
    with dask.config.set({"distributed.nanny.pre-spawn-environ": {"A": 1}, "distributed.nanny.environ": {"B": "2"}}):
        assert foreign_worker._nanny_environ(worker(nanny="tcp://127.0.0.1:1")) == {
            "A": 1,
            "B": "2",
            "PYTHONHASHSEED": "6640",
        }
        assert foreign_worker._nanny_environ(worker()) == {}


def test_workers_share_a_server_only_if_it_is_equivalent_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    here = foreign_worker._server_folder("tcp://a:1", {"HOME": "/x", "LD_PRELOAD": "a.so"})
    assert here == foreign_worker._server_folder("tcp://a:1", {"HOME": "/y", "LD_PRELOAD": "a.so"})
    assert here != foreign_worker._server_folder("tcp://b:1", {"HOME": "/x", "LD_PRELOAD": "a.so"})
    assert here != foreign_worker._server_folder("tcp://a:1", {"HOME": "/x", "LD_PRELOAD": "b.so"})
    monkeypatch.setattr(foreign_worker, "_container_identity", lambda: ["net:[4026531999]"])
    assert here != foreign_worker._server_folder("tcp://a:1", {"HOME": "/x", "LD_PRELOAD": "a.so"})


@pytest.mark.skipif(not Path("/proc/self/ns").is_dir(), reason="the system has no namespaces")
def test_container_identity_contains_the_network_namespace_and_the_control_group() -> None:
    namespaces, group = foreign_worker._container_identity()[:-1], foreign_worker._container_identity()[-1]
    assert any(name.startswith("net:[") for name in namespaces)
    assert group == Path("/proc/self/cgroup").read_text()


@pytest.mark.parametrize("is_own", [True, False])
def test_worker_that_closes_while_it_removes_a_run_logs_no_cancellation(
    monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    """Dask logs every exception that leaves teardown; the removal goes on in its thread."""
    begun, may_end, removed = threading.Event(), threading.Event(), list[str]()

    def remove(run_id: str = "r") -> None:
        begun.set()
        may_end.wait(30.0)
        removed.append(run_id)

    async def close_worker() -> None:
        plugin = foreign_worker.RunPlugin("r")
        plugin.host, plugin._is_own = cast(RankHost, SimpleNamespace(remove_run=remove)), is_own
        removal = asyncio.ensure_future(plugin.teardown(worker()))
        await asyncio.to_thread(begun.wait, 30.0)
        removal.cancel()
        await removal  # raises no CancelledError
        may_end.set()

    monkeypatch.setattr(foreign_worker, "_remove_host", lambda host: remove())
    asyncio.run(close_worker())
    assert removed == ["r"]
