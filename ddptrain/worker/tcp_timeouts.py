"""Sets the TCP time-outs of Dask's connections, which then survive a network cut of `failure.lost_after_s` seconds.

TCP sends lost data again once the network is back, unless the kernel has closed the connection before.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import dask
from distributed import Scheduler, Worker
from distributed.comm.tcp import set_tcp_timeout

_MIN_S = 11  # Dask refuses a shorter time-out


def tcp_timeout(lost_after_s: float) -> dict[str, str]:
    """Return Dask's configuration for new connections."""
    return {"distributed.comm.timeouts.tcp": f"{max(_MIN_S, math.ceil(lost_after_s))}s"}


def apply_tcp_timeout(server: Scheduler | Worker, lost_after_s: float) -> None:
    """Set the time-out of all existing and new connections of a scheduler or worker that ddptrain has started."""
    dask.config.set(tcp_timeout(lost_after_s))
    for comm in _comms(server):
        stream = getattr(comm, "stream", None)
        if stream is not None and not stream.closed() and stream.socket.family in (socket.AF_INET, socket.AF_INET6):
            set_tcp_timeout(stream)


def _comms(server: Scheduler | Worker) -> Iterator[Any]:
    pool: Any = server.rpc
    batched: Iterable[Any]
    if isinstance(server, Worker):
        batched = [server.batched_stream]
    else:
        batched = [*server.stream_comms.values(), *server.client_comms.values()]
    yield from (each.comm for each in batched if each is not None)
    yield from chain(server._comms, *pool.available.values(), *pool.occupied.values())  # noqa: SLF001  # no public API
