"""`python -m tests.servers.attacker PORTS MARKER [user]`: a stranger tries to run code through a cluster.

It calls the Dask scheduler, or worker, behind each TCP port of PORTS (comma-separated) without a certificate, and asks
it to make the folder MARKER. With `user`, it first becomes another user of the machine. It prints one line for each
attempt.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from distributed import Client, rpc

NOBODY = 65534
PATIENCE_S = 6.0


async def main(ports: list[str], marker: str) -> None:
    addresses = [f"{scheme}://127.0.0.1:{port}" for port in ports for scheme in ("tcp", "tls")]
    attacks = (run_on_scheduler, run_on_worker)
    print(*await asyncio.gather(*(told(attack, each, marker) for each in addresses for attack in attacks)), sep="\n")


async def told(attack: Callable[[str, str], Awaitable[Any]], address: str, marker: str) -> str:
    try:
        answer = await asyncio.wait_for(attack(address, marker), PATIENCE_S)
        return f"{address} {attack.__name__} answered {answer}"
    except Exception as error:
        return f"{address} {attack.__name__} failed {type(error).__name__} {' '.join(str(error).split())}"


async def run_on_scheduler(address: str, marker: str) -> Any:
    async with Client(address, asynchronous=True, timeout=2, set_as_default=False) as client:
        return await client.run_on_scheduler(os.mkdir, marker)


async def run_on_worker(address: str, marker: str) -> Any:
    from distributed.protocol.pickle import dumps

    async with rpc(address, timeout=2) as server:
        return await server.run(function=dumps(os.mkdir), args=dumps((marker,)))


if __name__ == "__main__":
    if sys.argv[3:]:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    asyncio.run(main(sys.argv[1].split(","), sys.argv[2]))
