"""The Dask task of a rank of `dispatch.run`: starts the rank on this worker, and returns its result."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cloudpickle
from distributed import Worker, get_worker

from ddptrain.compat.dask_pytorch_ddp import failures, outbox
from ddptrain.compat.dask_pytorch_ddp.rank_entrypoint import ERROR, VALUE, read_answer
from ddptrain.protocol.rank_spec import RankSpec
from ddptrain.protocol.worker_notices import RankExit, exit_from_json
from ddptrain.worker import rank_task, spool
from ddptrain.worker.foreign_worker import rank_host

_POLL_S = 0.1
_TAIL_BYTES = 2000


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
        exited = exit_from_json(rank_task.run_rank(spec.to_json()))
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
