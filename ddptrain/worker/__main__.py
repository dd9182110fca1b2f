"""`python -m ddptrain.worker`: a light Dask worker with slots for ranks and a warm rank server.

    python -m ddptrain.worker --scheduler tcp://127.0.0.1:8786 --slots 2 --scratch DIR

With `--scheduler -` the address comes as a line on stdin (the driver starts this process before it has a scheduler),
and the end of stdin ends the process: it belongs to whoever holds the other end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from ddptrain.worker import environment
from ddptrain.worker.server import RankServer

if TYPE_CHECKING:
    from distributed import Worker

_SCHEDULER_TIMEOUT_S = 60.0


def main(argv: list[str] | None = None) -> None:
    """Serve until the scheduler, the parent or a signal ends it; leave nothing behind."""
    options = _parser().parse_args(argv)
    scratch = Path(options.scratch or tempfile.mkdtemp(prefix="ddptrain-worker-"))
    scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
    gpus = tuple(options.gpus.split(",")) if options.gpus else ()
    slots = options.slots or len(gpus) or 1
    # First of all: it imports torch for two seconds while this process imports Dask.
    server = RankServer(environment.server_environment(os.environ), scratch / "rank-server.log")
    own = options.scheduler == "-"
    code = 0
    try:
        _import_dask()
        address = sys.stdin.readline().strip() if own else options.scheduler
        if address:
            host = options.host or ("127.0.0.1" if "//127.0.0.1:" in address else None)
            import asyncio

            asyncio.run(_serve(address, host, server, slots, gpus, scratch, own=own))
    except BaseException:
        traceback.print_exc()
        code = 1
    _tidy_up(server, scratch, keep=bool(options.scratch) and not own)
    os._exit(code)  # threads of tasks may still wait for a rank's end


def _tidy_up(server: RankServer, scratch: Path, *, keep: bool) -> None:
    """End the ranks and their server, and delete what they wrote unless the folder is the user's own."""
    server.close()
    if server.wait(timeout_s=8.0) and not keep:
        shutil.rmtree(scratch, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddptrain.worker", description="A Dask worker with slots for ranks."
    )
    parser.add_argument("--scheduler", required=True, help="address of the scheduler, or - to read it from stdin")
    parser.add_argument("--slots", type=int, default=0, help="ranks that fit here (default: one per GPU, else 1)")
    parser.add_argument("--gpus", default="", help="comma-separated devices, one per slot (default: none)")
    parser.add_argument("--host", default="", help="address to listen on (default: the one that reaches the scheduler)")
    parser.add_argument("--scratch", default="", help="folder for ranks' output (default: a temporary one)")
    return parser


def _import_dask() -> None:
    import dask
    import distributed

    assert distributed is not None
    import logging

    logging.getLogger("distributed").setLevel(logging.WARNING)
    dask.config.set(
        {
            "distributed.worker.profile.enabled": False,  # samples every thread 100 times a second
            "distributed.admin.system-monitor.interval": "5s",
            "distributed.admin.tick.interval": "1s",  # 50 wake-ups a second otherwise
            "distributed.diagnostics.nvml": False,
            "distributed.comm.timeouts.connect": "15s",
            "distributed.comm.timeouts.tcp": "15s",
        }
    )


async def _serve(
    address: str,
    listen: str | None,
    server: RankServer,
    slots: int,
    gpus: tuple[str, ...],
    scratch: Path,
    own: bool,
) -> None:
    import asyncio

    from distributed import Worker

    from ddptrain.spec import GPU_RESOURCE, SLOT_RESOURCE
    from ddptrain.worker.host import RankHost

    environ = environment.without_nanny(os.environ, {})
    host = RankHost(server, environ, gpus, scratch)
    resources = {SLOT_RESOURCE: float(slots)} | ({GPU_RESOURCE: float(len(gpus))} if gpus else {})
    worker = Worker(
        address,
        nthreads=slots,
        resources=resources,
        host=listen,
        local_directory=str(scratch),
        plugins=(host,),
        memory_limit=0,
        dashboard=False,
        death_timeout=_SCHEDULER_TIMEOUT_S,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver answers Ctrl-C
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    if own:
        threading.Thread(target=_wait_for_parent, args=(server, scratch), daemon=True).start()
    life = asyncio.ensure_future(_live(worker))
    told_to_stop = asyncio.ensure_future(stop.wait())
    await asyncio.wait((life, told_to_stop), return_when=asyncio.FIRST_COMPLETED)
    server.close()
    told_to_stop.cancel()
    if life.done():
        life.result()  # raises what ended it
    else:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(worker.close(timeout=2.0, executor_wait=False, nanny=False), 3.0)


async def _live(worker: Worker) -> None:
    await worker
    await worker.finished()


def _wait_for_parent(server: RankServer, scratch: Path) -> None:
    """Block until stdin ends: then nobody is left to serve, or to tidy up after this process."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    _tidy_up(server, scratch, keep=False)
    os._exit(0)


if __name__ == "__main__":
    main()
