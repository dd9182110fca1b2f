"""`python -m ddptrain.worker`: a light Dask worker with slots for ranks and a warm rank server.

    python -m ddptrain.worker --scheduler tcp://127.0.0.1:8786 --slots 2
    python -m ddptrain.worker --scheduler-file scheduler.json --tls-dir DIR

With `--scheduler -` the address comes as a line on stdin (the driver starts this process before it has a scheduler),
and the end of stdin ends the process: it belongs to whoever holds the other end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ddptrain.errors import ClusterError
from ddptrain.gpus import default_slots, visible_gpus
from ddptrain.protocol.rank_spec import LOST_AFTER_S
from ddptrain.worker import environment
from ddptrain.worker.rank_server_client import OwnRankServer

if TYPE_CHECKING:
    from distributed import Security, Worker

    from ddptrain.worker.rank_host import RankHost

_FILE_POLL_S = 0.05
_END_TIMEOUT_S = 8.0  # for the rank server: its ranks' last grace, and a margin


def main(argv: list[str] | None = None) -> None:
    """Serve until the scheduler, the parent or a signal ends it; leave nothing behind."""
    options = _parser().parse_args(argv)
    owned = options.scheduler == "-"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # The driver answers Ctrl-C for the worker that it owns.
    signal.signal(signal.SIGINT, signal.SIG_IGN if owned else lambda *_: sys.exit(0))
    scratch = _scratch(options.scratch, owned=owned)
    servers = _Servers(scratch)
    servers.start()  # first of all: it imports torch for two seconds while this process imports Dask
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
    _tidy_up(servers)
    os._exit(code)  # threads of tasks may still wait for a rank's end


class _Servers:
    """The rank server, and any that takes the place of one that has died; `scratch` is deleted with the last."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.scheduler = ""  # its address, once it is known, if its folder for sockets goes with this worker
        self.all: list[OwnRankServer] = []

    def start(self) -> OwnRankServer:
        """Start a rank server, which imports while the caller goes on."""
        env = environment.server_environment(os.environ)
        self.all.append(OwnRankServer(env, self.scratch / "rank-server.log"))
        return self.all[-1]

    def close(self) -> None:
        """End every rank, and the servers."""
        for server in self.all:
            server.close()


class _LazyThreadPoolExecutor(ThreadPoolExecutor):
    """Makes threads as they are needed; nobody waits for them at the end, for ranks end by other ways."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddptrain.worker", description="A Dask worker with slots for ranks."
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--scheduler", help="address of the scheduler, or - to read it from stdin")
    where.add_argument(
        "--scheduler-file", type=Path, help="JSON file with the scheduler's address, which is waited for"
    )
    parser.add_argument("--tls-dir", type=Path, help="folder with cert.pem and key.pem (default: no TLS)")
    parser.add_argument("--slots", type=int, default=0, help="ranks that fit (default: one per GPU, else per 2 cores)")
    parser.add_argument("--gpus", default="auto", help="auto, none, or devices as 0,1, one a slot (default: auto)")
    parser.add_argument("--host", default="", help="address to listen on (default: the one that reaches the scheduler)")
    parser.add_argument("--name", default="", help="what the scheduler calls this worker (default: its address)")
    parser.add_argument("--scratch", default="", help="folder below which ranks write (default: the temporary one)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for the scheduler (default: 60)")
    return parser


def _scratch(folder: str, *, owned: bool) -> Path:
    """A folder of this process, deleted at its end; the driver hands its own one over to a worker that it owns."""
    if not owned or not folder:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        return Path(tempfile.mkdtemp(prefix="ddptrain-worker-", dir=folder or None))
    scratch = Path(folder)
    scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
    return scratch


def _tidy_up(servers: _Servers) -> None:
    """End the ranks and their server, and delete what they wrote."""
    for number in (signal.SIGTERM, signal.SIGINT):
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, signal.SIG_IGN)
    servers.close()
    if all(server.wait(_END_TIMEOUT_S) for server in servers.all):
        shutil.rmtree(servers.scratch, ignore_errors=True)
    if servers.scheduler:
        from ddptrain.protocol.unix_comm import remove_dead_socket_dir

        remove_dead_socket_dir(servers.scheduler)  # its driver may have been killed


def _serve(options: argparse.Namespace, servers: _Servers, *, owned: bool) -> None:
    gpus = _gpus(options.gpus)
    slots = options.slots or default_slots(gpus)
    _import_dask()
    import asyncio

    from ddptrain.worker.rank_host import RankHost, slot_resources

    resources = slot_resources(slots, gpus)
    address = _address(options)
    if not address:
        return  # whoever owns this worker is gone already
    environ = environment.without_nanny(os.environ, {})
    host = RankHost(servers.all[0], servers.start, environ, gpus, servers.scratch)
    if owned:
        servers.scheduler = address
        threading.Thread(target=_wait_for_parent, args=(servers,), daemon=True).start()
    asyncio.run(_live(options, address, host, resources))


def _gpus(words: str) -> tuple[str, ...]:
    if words == "auto":
        return visible_gpus(os.environ)
    return tuple(name.strip() for name in words.split(",") if name.strip()) if words != "none" else ()


def _import_dask() -> None:
    import dask
    import distributed

    assert distributed is not None
    import logging

    logging.getLogger("distributed").setLevel(logging.WARNING)
    dask.config.set(
        {
            "distributed.worker.http.routes": [],  # Dask's HTTP server always listens: nothing is to be seen there
            "distributed.worker.profile.enabled": False,  # samples every thread 100 times a second
            "distributed.admin.system-monitor.interval": "5s",
            "distributed.admin.tick.interval": "1s",  # 50 wake-ups a second otherwise
            "distributed.diagnostics.nvml": False,
            "distributed.comm.timeouts.connect": "15s",
            "distributed.comm.timeouts.tcp": f"{LOST_AFTER_S:.0f}s",
        }
    )


def _address(options: argparse.Namespace) -> str:
    """The scheduler's address, once it is known; "" where nobody will tell it. Raises ClusterError."""
    if options.scheduler_file is None:
        return sys.stdin.readline().strip() if options.scheduler == "-" else str(options.scheduler)
    deadline = time.monotonic() + options.timeout
    while True:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # not there, or half written
            return str(json.loads(options.scheduler_file.read_text())["address"])
        if time.monotonic() > deadline:
            raise ClusterError(f"{options.scheduler_file} has told no scheduler's address within {options.timeout:g} s")
        time.sleep(_FILE_POLL_S)


def _security(tls_dir: Path | None) -> Security | None:
    """TLS with the cluster's one certificate, which is its own authority."""
    from distributed import Security

    if tls_dir is None:
        return None
    certificate, key = str(tls_dir / "cert.pem"), str(tls_dir / "key.pem")
    return Security(require_encryption=True, tls_ca_file=certificate, tls_worker_cert=certificate, tls_worker_key=key)


async def _live(options: argparse.Namespace, address: str, host: RankHost, resources: dict[str, float]) -> None:
    """Be a Dask worker until the scheduler or a signal ends it. Raises ClusterError where no scheduler answers."""
    import asyncio

    from distributed import Worker

    from ddptrain.protocol.rank_spec import WORKER_METRIC
    from ddptrain.worker.rank_host import MOST_SLOTS

    worker = Worker(
        address,
        name=options.name or None,
        nthreads=MOST_SLOTS,  # the resources alone say how many ranks fit, so that they can grow
        executor=_LazyThreadPoolExecutor(MOST_SLOTS, "ddptrain-task"),
        resources=resources,
        **_listening(options.host, address),
        security=_security(options.tls_dir),
        local_directory=str(host.scratch),
        plugins=(host,),
        memory_limit=0,
        dashboard=False,
        death_timeout=options.timeout,
    )
    worker.metrics[WORKER_METRIC] = host.metric
    signals = _Signals()
    life = asyncio.ensure_future(_joined(worker, address))
    told_to_stop = asyncio.ensure_future(signals.first.wait())
    await asyncio.wait((life, told_to_stop), return_when=asyncio.FIRST_COMPLETED)
    if not life.done():
        leaving = asyncio.ensure_future(host.leave(lambda: signals.count > 1))
        await asyncio.wait((life, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
    host.server.close()
    told_to_stop.cancel()
    if life.done():
        life.result()  # raises what ended it
    else:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(worker.close(timeout=2.0, executor_wait=False, nanny=False), 3.0)


def _listening(host: str, scheduler_address: str) -> dict[str, Any]:
    """Where the worker listens: on a unix socket beside that of its scheduler, else at `host`."""
    from ddptrain.protocol import unix_comm

    if unix_comm.is_unix(scheduler_address):
        return {"protocol": unix_comm.SCHEME, "host": unix_comm.worker_path(scheduler_address)}
    return {"host": host or ("127.0.0.1" if "//127.0.0.1:" in scheduler_address else None)}


class _Signals:
    """Counts what tells this process to end: SIGTERM, and Ctrl-C unless the driver answers that."""

    def __init__(self) -> None:
        import asyncio

        self.first = asyncio.Event()
        self.count = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._take)

    def _take(self) -> None:
        self.count += 1
        self.first.set()


async def _joined(worker: Worker, address: str) -> None:
    try:
        await worker
    except (OSError, TimeoutError, RuntimeError) as error:
        cause = error.__cause__ or error  # Dask's RuntimeError says only that something failed
        raise ClusterError(f"this worker could not join the Dask scheduler at {address}: {cause}") from error
    await worker.finished()


def _wait_for_parent(servers: _Servers) -> NoReturn:
    """Block until stdin ends: then nobody is left to serve, or to tidy up after this process."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    _tidy_up(servers)
    os._exit(0)


if __name__ == "__main__":
    main()
