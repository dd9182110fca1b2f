"""A client that reserves and releases a slot repeatedly, and prints which slot it had and when."""

from __future__ import annotations

import json
import sys
import time

from distributed import Client

from ddptrain.clusters.scheduler import slots


def main(address: str, name: str, times: int) -> None:
    """Print a line [[worker, index], from_s, until_s] for each slot held; seconds of the machine's clock."""
    with Client(address, set_as_default=False) as client:
        for number in range(times):
            run_id = f"{name}-{number}"
            while "slots" not in (
                answer := client.run_on_scheduler(slots.reserve, client.id, run_id, 1 + number % 2, in_line=True)
            ):
                time.sleep(0.001)
            got_s = time.monotonic()
            held = [(slot[0], slot[2]) for slot in answer["slots"]]
            left_s = time.monotonic()
            client.run_on_scheduler(slots.release, run_id)
            print(json.dumps([held, got_s, left_s]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
