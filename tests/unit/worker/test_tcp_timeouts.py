"""Connections of a scheduler and its workers survive a network cut for the configured time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import dask
import pytest
from distributed import Scheduler, Worker

from ddptrain.worker.tcp_timeouts import apply_tcp_timeout, tcp_timeout


@pytest.fixture(autouse=True)
def own_config() -> Iterator[None]:
    with dask.config.set({"distributed.comm.timeouts.tcp": "30s"}):
        yield


@pytest.mark.parametrize(("lost_after_s", "timeout"), [(60.0, "60s"), (5.0, "11s"), (12.2, "13s")])
def test_time_out_is_never_shorter_than_the_limit_nor_than_what_dask_takes(lost_after_s: float, timeout: str) -> None:
    assert tcp_timeout(lost_after_s) == {"distributed.comm.timeouts.tcp": timeout}


async def timeouts() -> tuple[set[int], set[int]]:
    """TCP_USER_TIMEOUT in ms of the connections of a scheduler and a worker, after it was set for both."""
    async with (
        Scheduler(host="127.0.0.1", dashboard=False, dashboard_address="127.0.0.1:0") as scheduler,
        Worker(scheduler.address, nthreads=1, dashboard=False) as worker,
    ):
        apply_tcp_timeout(scheduler, 70.0)
        apply_tcp_timeout(worker, 80.0)
        (stream,) = scheduler.stream_comms.values()
        sockets = [stream.comm.stream.socket], [worker.batched_stream.comm.stream.socket]
        option = (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        first, second = ({each.getsockopt(*option) for each in found} for found in sockets)
        return first, second


def test_connections_that_are_there_follow() -> None:
    assert asyncio.run(timeouts()) == ({70_000}, {80_000})
    assert dask.config.get("distributed.comm.timeouts.tcp") == "80s"
