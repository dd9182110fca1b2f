"""`python -m ddptrain.worker`: a light Dask worker with slots for ranks and a warm rank server.

    python -m ddptrain.worker --scheduler tcp://127.0.0.1:8786 --slots 2
    python -m ddptrain.worker --scheduler-file scheduler.json --tls-dir DIR

With `--scheduler -` the address is a line on stdin, because the driver starts this process before it has a scheduler.
The process ends when stdin ends, which happens when the driver ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ddptrain import log
from ddptrain.errors import ClusterError, UsageError
from ddptrain.file_ops import make_temp_folder
from ddptrain.gpus import default_slots, visible_gpus
from ddptrain.protocol import deadlines
from ddptrain.protocol.rank_spec import LOST_AFTER_S
from ddptrain.worker import rank_environment
from ddptrain.worker.rank_server_client import RankServerClient

if TYPE_CHECKING:
    from types import FrameType

    from distributed import Security, Worker

    from ddptrain.worker.rank_host import RankHost

_FILE_POLL_S = 0.05


def main(argv: list[str] | None = None) -> None:
    """Run the worker until the scheduler, the parent process or a signal ends it, and clean up."""
    options = _parser().parse_args(argv)
    with contextlib.suppress(UsageError):  # the driver, or `cluster up`, has already reported a wrong DDPTRAIN_LOG
        log.to_stderr()
    owned = options.scheduler == "-"
    received: list[int] = []
    _handle_signals(lambda number, _: received.append(number), owned=owned)
    scratch = _scratch(options.scratch, owned=owned)
    servers = _RankServers(scratch, options.tls_dir if owned else None)
    servers.start()  # first, because the server imports torch for two seconds; meanwhile this process imports Dask

    def end(*_: object) -> NoReturn:  # not an exception: any import may catch it
        _clean_up(servers)
        os._exit(0)

    _handle_signals(end, owned=owned)
    if received:
        end()
    code = 0
    try:
        _serve(options, servers, owned=owned)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except ClusterError as error:
        print(error, file=sys.stderr)
        code = int(error.exit_code)
    except BaseException:
        traceback.print_exc()
        code = 1
    _clean_up(servers)
    os._exit(code)  # task threads may still wait for a rank to end


def _handle_signals(handler: Callable[[int, FrameType | None], object], *, owned: bool) -> None:
    signal.signal(signal.SIGTERM, handler)
    # Ctrl-C reaches the driver, too, which then stops the worker that it has started.
    signal.signal(signal.SIGINT, signal.SIG_IGN if owned else handler)


class _RankServers:
    """The rank servers of this worker: the first one, and those that replaced a server that had died."""

    def __init__(self, scratch: Path, driver_folder: Path | None = None) -> None:
        """`driver_folder`: where the driver that has started this worker keeps its key."""
        self.scratch, self.driver_folder, self.parent = scratch, driver_folder, os.getppid()
        self.all: list[RankServerClient] = []

    def start(self) -> RankServerClient:
        """Start a rank server. It imports torch while the caller continues."""
        env = rank_environment.server_environment(os.environ)
        self.all.append(RankServerClient(env, self.scratch / "rank-server.log"))
        return self.all[-1]

    def close(self) -> None:
        """End all servers and their ranks."""
        for server in self.all:
            server.close()


class _LazyThreadPoolExecutor(ThreadPoolExecutor):
    """Starts threads on demand. Shutdown does not wait for them: the rank server stops the ranks."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddptrain.worker", description="A Dask worker with slots for ranks."
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--scheduler", help="address of the scheduler, or - to read it from stdin")
    where.add_argument(
        "--scheduler-file", type=Path, help="JSON file with the scheduler's address; waits until it exists"
    )
    parser.add_argument("--tls-dir", type=Path, help="folder with cert.pem and key.pem (default: no TLS)")
    parser.add_argument("--slots", type=int, default=0, help="ranks at a time (default: one per GPU, else per 2 cores)")
    parser.add_argument("--gpus", default="auto", help="auto, none, or devices as 0,1, one per slot (default: auto)")
    parser.add_argument("--host", default="", help="address to listen on (default: the one that reaches the scheduler)")
    parser.add_argument("--name", default="", help="name of this worker (default: its address)")
    parser.add_argument("--scratch", default="", help="folder for the files of ranks (default: the temporary one)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for the scheduler (default: 60)")
    return parser


def _scratch(folder: str, *, owned: bool) -> Path:
    """Create the scratch folder. A worker that a driver has started (`owned`) uses the driver's `folder` itself."""
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        if owned:
            return Path(folder)
    return make_temp_folder("ddptrain-worker-", folder)[0]


def _clean_up(servers: _RankServers) -> None:
    """End the ranks and their server, and delete their files."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    servers.close()
    if all(server.wait(deadlines.SERVER_END_S) for server in servers.all):
        shutil.rmtree(servers.scratch, ignore_errors=True)
    if servers.driver_folder is not None and os.getppid() != servers.parent:  # the driver was killed
        shutil.rmtree(servers.driver_folder, ignore_errors=True)


def _serve(options: argparse.Namespace, servers: _RankServers, *, owned: bool) -> None:
    gpus = _gpus(options.gpus)
    slots = options.slots or default_slots(gpus)
    _import_dask()
    import asyncio

    from ddptrain.worker.rank_host import RankHost, slot_resources

    resources = slot_resources(slots, gpus)
    address = _address(options)
    if not address:
        return  # the driver that started this worker has already ended
    environ = rank_environment.without_nanny(os.environ, {})
    host = RankHost(servers.all[0], servers.start, environ, gpus, servers.scratch)
    if owned:
        threading.Thread(target=_wait_for_parent, args=(servers,), daemon=True).start()
    asyncio.run(_run(options, address, host, resources))


def _gpus(option: str) -> tuple[str, ...]:
    if option == "auto":
        return visible_gpus(os.environ)
    return tuple(name.strip() for name in option.split(",") if name.strip()) if option != "none" else ()


def _import_dask() -> None:
    import dask
    import distributed

    assert distributed is not None
    import logging

    logging.getLogger("distributed").setLevel(logging.WARNING)
    dask.config.set(
        {
            "distributed.worker.http.routes": [],  # Dask's HTTP server cannot be turned off: it shows nothing
            "distributed.worker.profile.enabled": False,  # would sample every thread 100 times per second
            "distributed.admin.system-monitor.interval": "5s",
            "distributed.admin.tick.interval": "1s",  # 50 wake-ups per second by default
            "distributed.diagnostics.nvml": False,
            "distributed.comm.timeouts.connect": "15s",
            "distributed.comm.timeouts.tcp": f"{LOST_AFTER_S:.0f}s",
        }
    )


def _address(options: argparse.Namespace) -> str:
    """Wait for the scheduler's address. Return "" if stdin ends without one. Raises ClusterError at the time-out."""
    if options.scheduler_file is None:
        return sys.stdin.readline().strip() if options.scheduler == "-" else str(options.scheduler)
    deadline = time.monotonic() + options.timeout
    while True:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # the file is missing or incomplete
            return str(json.loads(options.scheduler_file.read_text())["address"])
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{options.scheduler_file} has no scheduler's address after {options.timeout:g} s: is it up?"
            )
        time.sleep(_FILE_POLL_S)


def _security(tls_dir: Path | None) -> Security | None:
    """Return the TLS settings. The cluster's certificate is self-signed: it is also the certificate authority."""
    from distributed import Security

    if tls_dir is None:
        return None
    certificate, key = str(tls_dir / "cert.pem"), str(tls_dir / "key.pem")
    return Security(require_encryption=True, tls_ca_file=certificate, tls_worker_cert=certificate, tls_worker_key=key)


async def _run(options: argparse.Namespace, address: str, host: RankHost, resources: dict[str, float]) -> None:
    """Run the Dask worker until the scheduler or a signal ends it. Raises ClusterError if no scheduler answers."""
    import asyncio

    from distributed import Worker

    from ddptrain.protocol.rank_spec import WORKER_METRIC
    from ddptrain.worker.rank_host import MAX_SLOTS

    worker = Worker(
        address,
        name=options.name or None,
        nthreads=MAX_SLOTS,  # only the resources limit the number of ranks, so that it can be increased
        executor=_LazyThreadPoolExecutor(MAX_SLOTS, "ddptrain-task"),
        resources=resources,
        host=options.host or ("127.0.0.1" if "//127.0.0.1:" in address else None),
        security=_security(options.tls_dir),
        local_directory=str(host.scratch),
        plugins=(host,),
        memory_limit=0,
        dashboard=False,
        death_timeout=options.timeout,
    )
    worker.metrics[WORKER_METRIC] = host.metric
    signals = _Signals()
    worker_task = asyncio.ensure_future(_run_worker(worker, address))
    stop_signal = asyncio.ensure_future(signals.first.wait())
    await asyncio.wait((worker_task, stop_signal), return_when=asyncio.FIRST_COMPLETED)
    if not worker_task.done():
        draining = asyncio.ensure_future(host.drain(lambda: signals.count > 1))
        await asyncio.wait((worker_task, draining), return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
    host.server.close()
    stop_signal.cancel()
    if worker_task.done():
        worker_task.result()  # raises the error that ended it, if any
    else:
        with contextlib.suppress(Exception):  # the process ends in any case
            await asyncio.wait_for(worker.close(timeout=2.0, executor_wait=False, nanny=False), 3.0)


class _Signals:
    """Counts SIGTERM, and SIGINT unless it is ignored because the driver handles it."""

    def __init__(self) -> None:
        import asyncio

        self.first = asyncio.Event()
        self.count = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._count)

    def _count(self) -> None:
        self.count += 1
        self.first.set()


async def _run_worker(worker: Worker, address: str) -> None:
    try:
        await worker
    except (OSError, TimeoutError, RuntimeError) as error:
        cause = error.__cause__ or error  # Dask's RuntimeError says only that the start failed
        raise ClusterError(f"this worker could not join the Dask scheduler at {address}: {cause}") from error
    await worker.finished()


def _wait_for_parent(servers: _RankServers) -> NoReturn:
    """Wait for the end of stdin; then the driver has ended, and this process must clean up."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    _clean_up(servers)
    os._exit(0)


if __name__ == "__main__":
    main()
