"""`python -m ddptrain.clusters.scheduler.scheduler_process`: the scheduler of a cluster that outlives its command.

    python -m ddptrain.clusters.scheduler.scheduler_process --folder DIR --host 10.0.0.5 --idle-timeout 3600

It listens with TLS, with the cert.pem and key.pem in DIR. Once it listens it writes DIR/scheduler.json,
which it deletes at its end. If it ended by itself, DIR/ended.json says why. SIGTERM ends it and its workers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddptrain import log
from ddptrain.clusters.security import own_security, write_private_json
from ddptrain.config.rank_settings import LOST_AFTER_S
from ddptrain.errors import UsageError
from ddptrain.file_ops import temp_folder

if TYPE_CHECKING:
    from distributed import Scheduler

SCHEDULER_FILE = "scheduler.json"
ENDED_FILE = "ended.json"

_CONFIG: dict[str, object] = {
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.worker-ttl": None,  # drop_the_silent replaces it
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.http.routes": [],  # Dask's own let anyone end workers
    "distributed.comm.timeouts.tcp": f"{LOST_AFTER_S:.0f}s",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.admin.tick.interval": "1s",
    "distributed.diagnostics.nvml": False,
}
_LOOK_S = 1.0

_log = log.Log("ddptrain.scheduler")


def main(argv: list[str] | None = None) -> None:
    """Run the scheduler until a signal arrives or the idle time is over."""
    options = _parser().parse_args(argv)
    with contextlib.suppress(UsageError):  # `cluster up` has complained of a wrong DDPTRAIN_LOG
        log.to_stderr(default="info")  # into a file: `cluster logs` shows which runs got slots, and when
    with temp_folder("ddptrain-scheduler-") as scratch:
        asyncio.run(_serve(options, scratch))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddptrain.clusters.scheduler.scheduler_process",
        description="The Dask scheduler of a cluster of ddptrain's.",
    )
    parser.add_argument("--folder", type=Path, required=True, help="the cluster's folder")
    parser.add_argument("--host", default="127.0.0.1", help="address or name; auto: that of the default route")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--idle-timeout", type=float, default=0.0, help="seconds without a run; 0 is never (default)")
    parser.add_argument("--warm-driver", action="store_true", help="keep a process that forks drivers for commands")
    return parser


async def _serve(options: argparse.Namespace, scratch: Path) -> None:
    stop_signal = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop_signal.set)
    folder: Path = options.folder
    logging.getLogger("distributed").setLevel(logging.WARNING)
    host = _own_address() if options.host == "auto" else options.host
    scheduler = await new_scheduler(folder, scratch, host, options.port)
    write_private_json(folder / SCHEDULER_FILE, _card(scheduler))
    warm = _start_warm_driver(folder) if options.warm_driver else None
    _log.info("scheduler listens", address=scheduler.address, idle_timeout_s=options.idle_timeout)
    ends = {
        asyncio.ensure_future(stop_signal.wait()): "",
        asyncio.ensure_future(scheduler.finished()): "a client of it shut it down",
        asyncio.ensure_future(drop_the_silent(scheduler, lambda: _lost_after_s(scheduler))): "",
        asyncio.ensure_future(_idle_for(scheduler, options.idle_timeout)): f"idle for {options.idle_timeout:g} s",
    }
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    reason = next(ends[end] for end in ends if end.done())
    _log.info("scheduler ends", reason=reason or "ended by a signal")
    (folder / SCHEDULER_FILE).unlink(missing_ok=True)
    if reason:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_private_json(folder / ENDED_FILE, {"reason": reason, "at": now})
    if warm is not None:
        warm.terminate()
        warm.wait()
    for end in ends:
        end.cancel()
    await scheduler.close(reason=reason or "ended by a signal")


def _start_warm_driver(folder: Path) -> subprocess.Popen[bytes]:
    """Start the process that forks drivers (cli/warm/server.py); it ends with this process, however that ends."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "ddptrain.cli.warm.server", str(folder)],
        stdin=subprocess.PIPE,  # closed by the kernel at the end of this process
        start_new_session=True,
    )


async def new_scheduler(keys: Path, scratch: Path, host: str = "127.0.0.1", port: int = 0) -> Scheduler:
    """Return a scheduler that listens there with the key and the certificate of a folder."""
    import dask
    from distributed import Scheduler

    with dask.config.set(_CONFIG):
        scheduler: Scheduler = await Scheduler(
            protocol="tls",
            host=host,
            port=port,
            security=own_security(keys),
            dashboard=False,
            dashboard_address="127.0.0.1:0",  # Dask's HTTP server always listens; it has no routes here
            local_directory=str(scratch),  # Dask imports modules from below it; by default others may write there
        )
        return scheduler


def _own_address() -> str:
    """Return the address of the interface with the default route: a host's name often resolves to 127.0.1.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect(("10.255.255.255", 1))
        except OSError:
            return socket.gethostname()
        return str(way.getsockname()[0])


def _card(scheduler: Scheduler) -> dict[str, Any]:
    """Return the content of scheduler.json."""
    return {
        "address": scheduler.address,
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }


async def drop_the_silent(scheduler: Scheduler, limit_s: Callable[[], float]) -> None:
    """Remove workers that have sent no heartbeat for `limit_s` and for ten heartbeat intervals. Never returns.

    It uses the monotonic clock. Dask's own `worker-ttl` compares times of the wall clock: if that jumps forward, Dask
    removes every worker. Time in which this process itself was stopped does not count: it has not read the heartbeats
    of that time yet.
    """
    from distributed.scheduler import heartbeat_interval

    heard: dict[str, tuple[float, float]] = {}  # address -> Dask's time of the last heartbeat, and when we saw it
    now, looked = 0.0, time.monotonic()
    while True:
        ttl_s = limit_s()
        await asyncio.sleep(ttl_s / 8)
        now += min(time.monotonic() - looked, ttl_s / 4)
        looked = time.monotonic()
        longest_s = max(ttl_s, 10 * heartbeat_interval(len(scheduler.workers)))
        for address, state in [*scheduler.workers.items()]:
            noted, since = heard.get(address, (None, now))
            if noted != state.last_seen:
                heard[address] = (state.last_seen, now)
            elif now - since > longest_s:
                await scheduler.remove_worker(address, stimulus_id=f"ddptrain-silent-{now}")
        heard = {address: seen for address, seen in heard.items() if address in scheduler.workers}


async def _idle_for(scheduler: Scheduler, timeout_s: float) -> None:
    """Return once no run holds or waits for slots, no task exists and no client is connected for that long.

    Never returns with 0.
    """
    from ddptrain.clusters.scheduler.slots import USED_AT, is_busy

    since = time.monotonic()
    while not timeout_s or time.monotonic() - since < timeout_s:
        await asyncio.sleep(min(_LOOK_S, timeout_s / 4) if timeout_s else 3600.0)
        if scheduler.tasks or is_busy(scheduler) or scheduler.clients.keys() - {"fire-and-forget"}:  # Dask's own entry
            since = time.monotonic()
        since = max(since, getattr(scheduler, USED_AT, since))


def _lost_after_s(scheduler: Scheduler) -> float:
    """Return seconds that a worker may be silent: the longest `lost_after_s` of the runs on the cluster."""
    from ddptrain.clusters.scheduler.slots import PLUGIN_NAME, SlotTable

    table = scheduler.plugins.get(PLUGIN_NAME)
    return (table.lost_after_s if isinstance(table, SlotTable) else None) or LOST_AFTER_S


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
    sys.exit(0)
