"""`python plain_scheduler.py FILE`: a plain Dask scheduler, which writes its address to a file."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import dask
from distributed import Scheduler


async def _serve(path: str) -> None:
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address=":0") as scheduler:
        with open(path + ".new", "w", encoding="utf-8") as file:  # noqa: ASYNC230
            json.dump({"address": scheduler.address}, file)
        os.rename(path + ".new", path)
        await scheduler.finished()


if __name__ == "__main__":
    dask.config.set({"temporary-directory": os.path.dirname(sys.argv[1])})
    asyncio.run(_serve(sys.argv[1]))
