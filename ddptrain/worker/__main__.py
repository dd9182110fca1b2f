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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ddptrain import log
from ddptrain.config.rank_settings import LOST_AFTER_S
from ddptrain.errors import ClusterError, UsageError
from ddptrain.file_ops import make_temp_folder
from ddptrain.gpus import default_slots, visible_gpus
from ddptrain.protocol import deadlines
from ddptrain.protocol.rank_spec import WORKER_METRIC
from ddptrain.worker import rank_environment
from ddptrain.worker.rank_server_client import RankServerClient

if TYPE_CHECKING:
    from distributed import Worker

    from ddptrain.worker.rank_host import RankHost

_FILE_POLL_S = 0.05


def main(argv: list[str] | None = None) -> None:
    """Run the worker until the scheduler, the parent process or a signal ends it, and clean up."""
    options = _parser().parse_args(argv)
    with contextlib.suppress(UsageError):  # the driver, or `cluster up`, has already reported a wrong DDPTRAIN_LOG
        log.to_stderr()
    owned = options.scheduler == "-"
    numbers = [signal.SIGTERM, signal.SIGINT]
    if owned:  # Ctrl-C reaches the driver, too, which then stops the worker that it has started
        numbers.remove(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    received: list[int] = []
    for number in numbers:
        signal.signal(number, lambda number, _: received.append(number))
    process = _Process(options, owned=owned)
    process.start_server(
        options.rank_python
    )  # first, because the server imports torch for two seconds; meanwhile this one imports Dask
    for number in numbers:
        signal.signal(number, lambda *_: process.end(0))  # not an exception: any import may catch it
    if received:
        process.end(0)
    code = 0
    try:
        _serve(options, process, owned=owned)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except ClusterError as error:
        print(error, file=sys.stderr)
        code = int(error.exit_code)
    except BaseException:
        traceback.print_exc()
        code = 1
    process.end(code)


class _Process:
    """What this process leaves behind if it does not clean up: its scratch folder, and its rank servers.

    A second rank server replaces one that has died. A worker that a driver has started (`owned`) uses the driver's
    scratch folder itself, and deletes the folder with the driver's key if the driver was killed.
    """

    def __init__(self, options: argparse.Namespace, *, owned: bool) -> None:
        if options.scratch:
            Path(options.scratch).mkdir(parents=True, exist_ok=True, mode=0o700)
        in_place = owned and options.scratch
        self.scratch = Path(options.scratch) if in_place else make_temp_folder("ddptrain-worker-", options.scratch)[0]
        self.servers: list[RankServerClient] = []
        self._driver_folder: Path | None = options.tls_dir if owned else None
        self._parent = os.getppid()

    def start_server(self, python: str = sys.executable) -> RankServerClient:
        """Start a rank server. It imports torch while the caller continues."""
        env = rank_environment.server_environment(os.environ)
        self.servers.append(RankServerClient(env, self.scratch / "rank-server.log", python))
        return self.servers[-1]

    def end_with_stdin(self) -> NoReturn:
        """Wait for the end of stdin; then the driver has ended."""
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        self.end(0)

    def end(self, code: int) -> NoReturn:
        """End the ranks and their servers, delete the files, and end this process: task threads may still wait."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        for server in self.servers:
            server.close()
        if all(server.wait(deadlines.SERVER_END_S) for server in self.servers):
            shutil.rmtree(self.scratch, ignore_errors=True)
        if self._driver_folder is not None and os.getppid() != self._parent:
            shutil.rmtree(self._driver_folder, ignore_errors=True)
        os._exit(code)


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
    parser.add_argument("--rank-python", default=sys.executable, help="Python of the ranks (default: this one)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for the scheduler (default: 60)")
    return parser


def _serve(options: argparse.Namespace, process: _Process, *, owned: bool) -> None:
    if options.gpus == "auto":
        gpus = visible_gpus(os.environ)
    else:
        words = [] if options.gpus == "none" else options.gpus.split(",")
        gpus = tuple(word.strip() for word in words if word.strip())
    _import_dask()
    import asyncio

    from ddptrain.worker.rank_host import RankHost, slot_resources

    resources = slot_resources(options.slots or default_slots(gpus), gpus)
    address = _address(options)
    if not address:
        return  # the driver that started this worker has already ended
    environ = rank_environment.without_nanny(os.environ, {})
    host = RankHost(process.servers[0], process.start_server, environ, gpus, process.scratch)
    if owned:
        threading.Thread(target=process.end_with_stdin, daemon=True).start()
    asyncio.run(_run(options, address, host, resources))


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


async def _run(options: argparse.Namespace, address: str, host: RankHost, resources: dict[str, float]) -> None:
    """Run the Dask worker until the scheduler or a signal ends it. Raises ClusterError if no scheduler answers."""
    import asyncio

    from distributed import Security, Worker

    from ddptrain.worker.rank_host import MAX_SLOTS

    security = None
    if options.tls_dir is not None:  # the cluster's certificate is self-signed: it is also the certificate authority
        certificate, key = str(options.tls_dir / "cert.pem"), str(options.tls_dir / "key.pem")
        files = {"tls_ca_file": certificate, "tls_worker_cert": certificate, "tls_worker_key": key}
        security = Security(require_encryption=True, **files)
    worker = Worker(
        address,
        name=options.name or None,
        nthreads=MAX_SLOTS,  # only the resources limit the number of ranks, so that it can be increased
        executor=_LazyThreadPoolExecutor(MAX_SLOTS, "ddptrain-task"),
        resources=resources,
        host=options.host or ("127.0.0.1" if "//127.0.0.1:" in address else None),
        security=security,
        local_directory=str(host.scratch),
        plugins=(host,),
        memory_limit=0,
        dashboard=False,
        death_timeout=options.timeout,
    )
    worker.metrics[WORKER_METRIC] = host.metric
    loop, received = asyncio.get_running_loop(), list[int]()
    signalled = asyncio.Event()

    def take(number: int) -> None:
        received.append(number)
        signalled.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, take, number)
    running = asyncio.ensure_future(_join(worker, address))
    stopping = asyncio.ensure_future(signalled.wait())
    await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        draining = asyncio.ensure_future(host.drain(lambda: len(received) > 1))
        await asyncio.wait((running, draining), return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
    host.close_servers()
    stopping.cancel()
    if running.done():
        running.result()  # raises the error that ended it, if any
    else:
        with contextlib.suppress(Exception):  # the process ends in any case
            await asyncio.wait_for(worker.close(timeout=2.0, executor_wait=False, nanny=False), 3.0)


async def _join(worker: Worker, address: str) -> None:
    """Run the worker to its end. Raises ClusterError if it can't start."""
    try:
        await worker
    except (OSError, TimeoutError, RuntimeError) as error:
        cause = error.__cause__ or error  # Dask's RuntimeError says only that the start failed
        raise ClusterError(f"this worker could not join the Dask scheduler at {address}: {cause}") from error
    await worker.finished()


if __name__ == "__main__":
    main()
