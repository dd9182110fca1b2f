"""Upload a project twice to all workers of a cluster that cannot see it. Prints the seconds of both."""

from __future__ import annotations

import json
import queue
import sys
import time
from pathlib import Path

from distributed import Client

from ddptrain.driver.inbox import Inbox
from ddptrain.driver.reservation import SlotRequest, WaitHooks
from ddptrain.driver.transfer.code_package import pack
from ddptrain.driver.transfer.code_upload import upload_code
from ddptrain.driver.workers import Workers


def main(address: str, folder: Path, workers: int) -> None:
    """Print {"first_s", "again_s"}: the time to list, hash, ask, and upload if needed."""
    took = []
    with Client(address, set_as_default=False) as client:
        client.wait_for_workers(workers, timeout=60)
        for number in range(2):
            inbox: Inbox = queue.SimpleQueue()
            with Workers(client, f"ship-{number}", inbox) as worker_group:
                nobody = WaitHooks(None, lambda: None, lambda: "", lambda _: None, "")
                places = worker_group.reserve(SlotRequest(workers, False, 60.0, 0.0), nobody)
                began = time.perf_counter()
                package = pack(folder, [])
                shipped = upload_code(worker_group, places, package, folder / package.names[0], 200.0, lambda _: None)
                took.append(time.perf_counter() - began)
                assert all(shipped.roots), "the workers see the folder themselves"
    print(json.dumps({"first_s": took[0], "again_s": took[1]}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
