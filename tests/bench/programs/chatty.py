"""A script whose rank 1 prints 5 MB a second. SIGTERM preempts it: it records the time and ends with exit code 75."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

_LINE = "x" * 99


def _preempted(_: int, __: Any) -> None:
    Path(sys.argv[1], f"preempted-{os.environ['RANK']}").write_text(str(time.time_ns()))
    os._exit(75)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _preempted)
    Path(sys.argv[1], f"step-{os.environ['RANK']}").write_text(str(time.time_ns()))
    for _ in range(6_000):
        if os.environ["RANK"] == "1":
            print("\n".join([_LINE] * 5_000), flush=True)
        time.sleep(0.1)
