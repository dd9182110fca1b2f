"""Ends in the way that its first argument says."""

import os
import signal
import sys
import time

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler, record

import ddptrain


def recorded():
    """As a library does that has caught the error, written it down, and ends without a word."""
    try:
        raise ValueError("written down")
    except ValueError as error:
        get_error_handler().record_exception(error)
        os._exit(9)


def told():
    """As a script does that saves when it is told to go."""
    signal.signal(signal.SIGTERM, lambda *_: (print("saving", flush=True), sys.exit(75)))
    print("ready", flush=True)
    time.sleep(60)


def in_torch():
    torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(1, 1)))(torch.ones(3, 3))


def silently():
    print("argv", sys.argv[1:], "threads", os.environ["OMP_NUM_THREADS"])
    ctx = ddptrain.context()
    ctx.log({"mine": ctx.rank}, step=1)
    os._exit(0)


@record
def main():
    how = sys.argv[-1]
    if how in ("recorded", "in_torch") and os.environ["RANK"] == "0":
        time.sleep(60)
    {"recorded": recorded, "told": told, "in_torch": in_torch, "silently": silently}[how]()


if __name__ == "__main__":
    main()
