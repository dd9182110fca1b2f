"""`python plain_scheduler.py FILE TLS`: a plain Dask scheduler, which writes its address to a file.

TLS is a JSON object of arguments of Dask's Security; empty for none.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import dask
from distributed import Scheduler, Security


def _write(path: str, address: str) -> None:
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump({"address": address}, file)
    os.rename(path + ".new", path)


async def _serve(path: str, tls: dict[str, str]) -> None:
    security = Security(require_encryption=True, **tls) if tls else None
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address=":0", security=security) as it:
        _write(path, it.address)
        await it.finished()


if __name__ == "__main__":
    dask.config.set({"temporary-directory": os.path.dirname(sys.argv[1])})
    asyncio.run(_serve(sys.argv[1], json.loads(sys.argv[2])))
