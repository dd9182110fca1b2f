"""`dispatch.run`: a function on every slot of a Dask cluster, as the ranks of one process group."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
from distributed import Client, Future, Scheduler, Worker, get_worker

from ddptrain.clusters.compatibility import check_cluster
from ddptrain.clusters.scheduler import slots
from ddptrain.compat.dask_pytorch_ddp import failures, outbox
from ddptrain.compat.dask_pytorch_ddp.rank_entrypoint import ERROR, VALUE, read_answer
from ddptrain.config.run_config import FailureConfig, RunConfig
from ddptrain.driver.rank_specs import rank_sections
from ddptrain.driver.ranks import RankPlace
from ddptrain.driver.reservation import SlotRequest, WaitHooks
from ddptrain.driver.workers import Workers
from ddptrain.errors import ClusterError, UsageError
from ddptrain.protocol import rank_spec
from ddptrain.protocol.news import RankExit
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.results.layout import new_run_id
from ddptrain.worker import driver_calls, rank_task, spool
from ddptrain.worker.rank_host import rank_host

if TYPE_CHECKING:
    from dask_pytorch_ddp.dispatch import dispatch_with_ddp


__all__ = ["dispatch_with_ddp", "run"]

logger = logging.getLogger(__name__)

_WORKLOAD = "ddptrain.compat.dask_pytorch_ddp.rank_entrypoint:main"
_START_S = 60.0  # time for the first worker to appear
_WAIT_S = 300.0  # time to wait for slots that other runs use
GRACE_S = 10.0  # from SIGTERM to SIGKILL
_WATCH_S = 0.05
_WORKERS_POLL_S = 1.0
_VICTIMS_S = 1.0  # after a failure, time for the other ranks to fail with their own errors
_POLL_S = 0.1
_TAIL_BYTES = 2000


def run(
    client: Client,
    pytorch_function: Callable[..., Any],
    *args: Any,
    backend: str | None = None,
    pass_local_rank: bool = False,
    **kwargs: Any,
) -> list[Future[Any]]:
    """Run `pytorch_function(*args, **kwargs)` on every slot of the cluster; return one future per rank, in rank order.

    A worker that ddptrain has not started is one slot. Each rank is a separate process, in which the process group is
    initialized (`backend`: by default nccl if every slot has a GPU, else gloo). The future of a rank has the return
    value or the exception of the function; after an exception the other ranks are stopped. With `pass_local_rank` the
    function also gets `local_rank`: 0 with a GPU, because the rank sees only its own GPU; on the CPU the number of the
    rank on its host.

    Raises:
        ClusterError: there are no free slots, or workers lack a package.
        UsageError: the client is asynchronous, or the function can't be pickled.
    """
    if client.asynchronous:
        raise UsageError("dispatch.run needs a client that was not made with asynchronous=True")
    pickled = _pickled(pytorch_function, args, kwargs)
    worker_group = Workers(client, new_run_id("dispatch"), queue.SimpleQueue())
    hooks = WaitHooks(
        check=lambda workers: check_cluster(client, workers),
        worker_fault=lambda: None,
        last_words=lambda: "",
        tell=logger.warning,
        cluster="",
    )
    try:
        places = worker_group.reserve(SlotRequest(None, False, _START_S, _WAIT_S), hooks)
        specs = _specs(worker_group.run_id, places, backend)
        port = _store_port(client, specs[0], places[0])
        futures = []
        for spec, place in zip(specs, places, strict=True):
            future_arguments = _futures_in(args, kwargs)
            if pass_local_rank:  # with a GPU 0, because a rank sees only its own GPU
                future_arguments["local_rank"] = 0 if place.slot.gpu else place.placement.local_rank
            futures.append(
                client.submit(
                    run_job,
                    spec.with_port(port).to_json(),
                    pickled,
                    future_arguments,
                    key=spec.key,
                    workers=[place.slot.worker],
                    allow_other_workers=False,
                    resources={rank_spec.SLOT_RESOURCE: 1} if place.slot.counted else None,
                    pure=False,
                    retries=0,
                )
            )
    except BaseException:
        with contextlib.suppress(Exception):  # the scheduler may have ended
            client.run_on_scheduler(slots.release, worker_group.run_id)
        raise
    start(client, worker_group.run_id, {str(f.key): p.slot.worker for f, p in zip(futures, places, strict=True)})
    return futures


def _pickled(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
    """Return the pickled function and arguments, with None in place of futures, whose values Dask delivers."""
    plain_args = tuple(None if isinstance(value, Future) else value for value in args)
    plain_kwargs = {name: None if isinstance(value, Future) else value for name, value in kwargs.items()}
    try:
        data: bytes = cloudpickle.dumps((function, plain_args, plain_kwargs))
    except Exception as error:  # pickling runs user code, which may raise anything
        raise UsageError(f"{function!r} or its arguments can't be pickled for the workers: {error}") from error
    return data


def _futures_in(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    places: dict[int | str, Any] = {place: value for place, value in enumerate(args) if isinstance(value, Future)}
    return places | {name: value for name, value in kwargs.items() if isinstance(value, Future)}


def _specs(run_id: str, places: Sequence[RankPlace], backend: str | None) -> list[RankSpec]:
    chosen = backend or ("nccl" if all(place.slot.gpu for place in places) else "gloo")
    # The modules of the function are beside the client's script, or in its working directory.
    first = os.path.abspath(sys.path[0]) if sys.path else os.getcwd()
    search_path = tuple(dict.fromkeys((first, os.getcwd())))
    config = rank_sections(RunConfig(workload=_WORKLOAD, failure=FailureConfig(grace_s=GRACE_S)))
    return [
        RankSpec(
            run_id=run_id,
            attempt=1,
            rank=place.rank,
            config=config,
            placement=place.placement,
            group=rank_spec.ProcessGroup(chosen, rank_spec.DIST_TIMEOUTS_S["gloo"], places[0].slot.host),
            code=rank_spec.Code(_WORKLOAD, os.getcwd(), sys_path=search_path),
        )
        for place in places
    ]


def _store_port(client: Client, first: RankSpec, place: RankPlace) -> int:
    worker = place.slot.worker
    try:
        ports = client.run(open_store, first.run_id, first.key, first.group.master_addr, workers=[worker])
    except OSError as error:
        raise ClusterError(f"the worker {worker} can't listen on {first.group.master_addr}: {error}") from error
    return int(ports[worker])


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # Imported on first use, because it imports torch.
        if name == "dispatch_with_ddp":
            from dask_pytorch_ddp.dispatch import dispatch_with_ddp

            return dispatch_with_ddp
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def start(client: Client, run_id: str, places: Mapping[str, str]) -> None:
    """Watch the worker group until it has ended; `places` maps the keys of the ranks to workers."""
    loop: Any = client.loop
    loop.add_callback(_Watch(client, run_id, dict(places)).run)


class _Watch:
    """Watches one worker group. It has keys, not futures: if the user deletes all futures, Dask ends the ranks."""

    def __init__(self, client: Client, run_id: str, places: dict[str, str]) -> None:
        self.client, self.run_id, self.places = client, run_id, places
        self.failed_at: float | None = None
        self.stopped = False

    async def run(self) -> None:
        """Watch until the end; never raises."""
        with suppress(Exception):  # it runs in the user's event loop, which must not get errors
            await self._watch()
        with suppress(Exception):  # the scheduler may have ended
            await self.client.run_on_scheduler(slots.release, self.run_id)

    async def _watch(self) -> None:
        checked_at = time.monotonic()
        while (pending := self._pending_keys()) and self.client.status == "running":
            if self.failed_at is not None and not self.stopped and time.monotonic() - self.failed_at > _VICTIMS_S:
                self.stopped = True
                await self._stop(pending)
            if time.monotonic() - checked_at > _WORKERS_POLL_S:
                await self._give_up_lost(pending)
                checked_at = time.monotonic()
            await asyncio.sleep(_WATCH_S)

    def _pending_keys(self) -> list[str]:
        """Return the keys of ranks that have not ended; set failed_at after the first failure."""
        states = {key: self.client.futures.get(key) for key in self.places}
        if self.failed_at is None and any(state is None or state.status in _BAD for state in states.values()):
            self.failed_at = time.monotonic()
        return [key for key, state in states.items() if state is not None and state.status == "pending"]

    async def _stop(self, keys: Sequence[str]) -> None:
        workers = sorted({self.places[key] for key in keys})
        await self.client.run(
            driver_calls.stop_ranks,
            self.run_id,
            list(keys),
            GRACE_S,
            workers=workers,
            on_error="ignore",
            asynchronous=True,
        )

    async def _give_up_lost(self, keys: Sequence[str]) -> None:
        """Cancel the ranks of lost workers, for which Dask would wait forever."""
        workers = sorted({self.places[key] for key in keys})
        gone = await self.client.run_on_scheduler(_absent, workers)
        for key in keys:
            if self.places[key] in gone:
                reason = f"the worker {self.places[key]} of rank {key.rpartition('/')[2]} was lost"
                future: Future[Any] = Future(key, self.client)
                await self.client.cancel([future], asynchronous=True, force=True, reason="lost", msg=reason)


_BAD = ("error", "cancelled", "lost")


def _absent(workers: Sequence[str], dask_scheduler: Scheduler) -> list[str]:
    """Return the workers that have left the cluster; for run_on_scheduler."""
    return [worker for worker in workers if worker not in dask_scheduler.workers]


async def open_store(run_id: str, key: str, host: str, dask_worker: Worker) -> int:
    """Open the TCPStore of the worker group whose rank 0 has that key; return its port. For client.run."""
    return rank_host(dask_worker, run_id).open_store(key, host)


def run_job(spec_json: str, pickled: bytes, future_arguments: Mapping[int | str, Any]) -> Any:
    """Run the pickled (function, args, kwargs) as a rank; `future_arguments` are the arguments that the user passed as
    futures.

    Raises the exception of the function, or RankFailed if its process ended without one.
    """
    spec = RankSpec.from_json(spec_json)
    worker = get_worker()
    host = rank_host(worker, spec.run_id)
    folder = host.scratch / spec.run_id / f"job-{spec.rank}"
    folder.mkdir(parents=True, mode=0o700)
    job, answer = folder / "job", folder / "answer"
    job.write_bytes(cloudpickle.dumps((pickled, dict(future_arguments))))  # not unpickled here: that may import torch
    spec = dataclasses.replace(
        spec,
        code=dataclasses.replace(
            spec.code,
            params={"job": str(job), "answer": str(answer)},
            sys_path=(*spec.code.sys_path, worker.local_directory),  # Client.upload_file puts modules there
        ),
        env={**spec.env, outbox.VARIABLE: str(outbox.make_box(worker, spec.run_id))},
    )
    log = spool.rank_spool(host.scratch, spec.run_id, spec.attempt, spec.rank).log
    with _echoed(log):
        exited = rank_task.run_rank(spec.to_json())
    return _outcome(spec, str(answer), log, exited)


def _outcome(spec: RankSpec, answer: str, log: Path, exited: RankExit) -> Any:
    who = f"rank {spec.rank} on {socket.gethostname()}"
    try:
        if exited.status == 0:
            return read_answer(answer, VALUE)
        raised = read_answer(answer, ERROR)
    except FileNotFoundError:
        if exited.status == 0:
            return None  # the function called sys.exit(0)
        text = f"{who}: {exited.text}{_log_tail(log)}"
        raise failures.ended(text, exited.time_ns, victim=exited.status == -signal.SIGTERM) from None
    except Exception as error:  # unpickling runs user code, which may raise anything
        what = "return value" if exited.status == 0 else "exception"
        text = f"{who}: its {what} can't be read on its worker: {error!r}{_log_tail(log)}"
        raise failures.ended(text, exited.time_ns) from error
    raise raised


def _log_tail(log: Path) -> str:
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        text = file.read().decode("utf-8", "replace").strip()
        return f"; its last output:\n{text}" if text else ""
    return ""


@contextmanager
def _echoed(log: Path) -> Iterator[None]:
    """Copy the rank's output to the output of this worker until the block ends, as for Dask's own tasks."""
    ended = threading.Event()
    echo = threading.Thread(target=_echo, args=(log, ended), name="ddptrain-echo", daemon=True)
    echo.start()
    try:
        yield
    finally:
        ended.set()
        echo.join()


def _echo(log: Path, ended: threading.Event) -> None:
    offset, last = 0, False
    while True:
        with suppress(OSError):  # the log does not exist yet, or stderr is closed
            data = spool.read_chunk(log, offset, spool.READ_LIMIT_BYTES)
            offset += len(data)
            if data:
                sys.stderr.write(data.decode("utf-8", "replace"))
                sys.stderr.flush()
                continue
        if last:
            return
        last = ended.wait(_POLL_S)
